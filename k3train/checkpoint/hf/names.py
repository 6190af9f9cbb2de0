"""The one table between k3train's tensors and those of the released Hugging Face layout. No torch.

Both directions read it: export writes what it lists, import expects nothing else. Names and shapes of the
release are those of k3 spec section 1.2; a test counts them against the released headers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

from k3train.config.schema import Model, RouterInput
from k3train.plan.counts import is_mla

Shape = tuple[int, ...]

MXFP4_GROUP = 32
"""Consecutive inputs of an expert matrix that share one scale."""


class Layout(Enum):
    """Which of the two published folders."""

    k3 = "k3"
    """Kimi K3: the text model below ``language_model.``, its settings below ``text_config``."""
    kimi_linear = "kimi_linear"
    """Kimi Linear's: the text model alone, names and settings without a wrapper."""


class Form(Enum):
    """How the values of one k3train tensor lie in the release."""

    same = "same"
    row = "row"
    """[d] here, [1, d] there: the query of a depth mix is a linear layer there."""
    taps = "taps"
    """[channels, taps] here, [channels, 1, taps] there: a depth-wise convolution."""
    padded = "padded"
    """[heads] here, followed by zeros there."""
    halves = "halves"
    """[out, hidden | embedding] here, [out, embedding | hidden] there."""
    experts = "experts"
    """[experts, in, out] here, one [out, in] for each expert there."""
    bounds = "bounds"
    """Made from the selection bias; the release does not hold it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a k3train checkpoint and what the release has for it."""

    ours: str
    """Key in a k3train checkpoint."""
    shape: Shape
    """Global shape there."""
    fp32: bool
    """k3train keeps it in fp32 whatever the model's precision is."""
    released_fp32: bool
    """The release keeps it in fp32; otherwise it is bf16 (or MXFP4)."""
    form: Form
    name: str
    """Tensor of the release; ``{}`` in it stands for the number of an expert."""
    stored: Shape
    """Shape of that tensor, or of each expert's."""
    also: tuple[Shape, ...] = ()
    """Other shapes that are read too."""

    @property
    def written(self) -> bool:
        """Whether the release holds it."""
        return self.form is not Form.bounds

    @property
    def names(self) -> list[str]:
        """Tensors of the release, in the order of the first axis here."""
        return [
            self.name.format(expert) for expert in range(self.shape[0] if self.form is Form.experts else 1)
        ]


def packed_names(name: str) -> tuple[str, str]:
    """Names of codes and scales that stand in for the expert matrix ``name`` in an MXFP4 release."""
    stem = name.removesuffix("weight")
    return f"{stem}weight_packed", f"{stem}weight_scale"


def packed_shapes(stored: Shape) -> tuple[Shape, Shape]:
    """Shapes of codes and scales of an expert matrix [out, in]: two codes a byte, one scale a group."""
    out, inputs = stored
    return (out, inputs // 2), (out, inputs // MXFP4_GROUP)


def table(model: Model, layout: Layout = Layout.k3) -> list[Entry]:
    """Every tensor of the text model, in the order in which an export writes them."""
    prefix = "language_model." if layout is Layout.k3 else ""
    d, vocabulary = model.hidden_size, (model.vocab_size, model.hidden_size)
    entries = [_matrix("embedding.weight", "model.embed_tokens.weight", vocabulary)]
    for layer in range(model.num_layers):
        entries += _under(f"layers.{layer}.", f"model.layers.{layer}.", _layer(model, layer, layout))
    if model.mtp.num_layers:
        entries += _under("mtp.", f"model.layers.{model.num_layers}.", _mtp(model))
    entries += _mix("output_mix", "model.output_attn_res", d)
    entries += [
        _kept("final_norm.weight", "model.norm.weight", (d,)),
        _matrix("output_head.weight", "lm_head.weight", vocabulary),
    ]
    return list(_under("", prefix, entries))


def _layer(model: Model, layer: int, layout: Layout) -> Iterator[Entry]:
    d = model.hidden_size
    yield from _mix("attention_mix", "self_attention_res", d)
    yield _kept("attention_norm.weight", "input_layernorm.weight", (d,))
    attention = _mla(model) if is_mla(model, layer) else _kda(model, layout)
    yield from _under("attention.", "self_attn.", attention)
    yield from _mix("ffn_mix", "mlp_res", d)
    yield _kept("ffn_norm.weight", "post_attention_layernorm.weight", (d,))
    if layer < model.num_dense_layers:
        yield from _under("ffn.", "mlp.", _mlp(d, model.dense_ffn_size))
    else:
        yield from _under("ffn.", "block_sparse_moe.", _moe(model))


def _kda(model: Model, layout: Layout) -> Iterator[Entry]:
    kda, d, heads = model.kda, model.hidden_size, model.num_heads
    width = heads * kda.head_dim
    # K3's release fills A_log up to the head size; Kimi Linear's holds it as [1, 1, heads, 1].
    padded = max(heads, kda.head_dim) if layout is Layout.k3 else heads
    yield Entry(
        ours="A_log", shape=(heads,), fp32=True, released_fp32=True, form=Form.padded, name="A_log",
        stored=(padded,), also=((heads,), (1, 1, heads, 1)),
    )  # fmt: skip
    yield _kept("dt_bias", "dt_bias", (width,), released_fp32=True)
    for part in "qkv":
        conv = _kept(f"{part}_conv", f"{part}_conv1d.weight", (width, kda.conv_kernel), released_fp32=True)
        yield replace(conv, form=Form.taps, stored=(width, 1, kda.conv_kernel))
    yield _kept("o_norm", "o_norm.weight", (kda.head_dim,), released_fp32=True)
    for part in "qkvg":
        yield _matrix(f"{part}_proj.weight", f"{part}_proj.weight", (width, d))
    yield _matrix("b_proj.weight", "b_proj.weight", (heads, d))
    yield _matrix("f_a.weight", "f_a_proj.weight", (kda.decay_rank, d))
    yield _matrix("f_b.weight", "f_b_proj.weight", (width, kda.decay_rank))
    yield _matrix("o_proj.weight", "o_proj.weight", (d, width))


def _mla(model: Model) -> Iterator[Entry]:
    mla, d, heads = model.mla, model.hidden_size, model.num_heads
    value = heads * mla.v_head_dim
    yield _matrix("q_a.weight", "q_a_proj.weight", (mla.q_lora_rank, d))
    yield _kept("q_a_norm.weight", "q_a_layernorm.weight", (mla.q_lora_rank,))
    query = heads * (mla.qk_head_dim + mla.qk_shared_head_dim)
    yield _matrix("q_b.weight", "q_b_proj.weight", (query, mla.q_lora_rank))
    latent = mla.kv_lora_rank + mla.qk_shared_head_dim
    yield _matrix("kv_a.weight", "kv_a_proj_with_mqa.weight", (latent, d))
    yield _kept("kv_a_norm.weight", "kv_a_layernorm.weight", (mla.kv_lora_rank,))
    both = heads * (mla.qk_head_dim + mla.v_head_dim)
    yield _matrix("kv_b.weight", "kv_b_proj.weight", (both, mla.kv_lora_rank))
    yield _matrix("g_proj.weight", "g_proj.weight", (value, d))
    yield _matrix("o_proj.weight", "o_proj.weight", (d, value))


def _mlp(d: int, ffn_size: int) -> Iterator[Entry]:
    yield _matrix("gate_proj.weight", "gate_proj.weight", (ffn_size, d))
    yield _matrix("up_proj.weight", "up_proj.weight", (ffn_size, d))
    yield _matrix("down_proj.weight", "down_proj.weight", (d, ffn_size))


def _moe(model: Model) -> Iterator[Entry]:
    moe, d = model.moe, model.hidden_size
    bias = "gate.e_score_correction_bias"
    width = moe.latent_size if moe.router.input is RouterInput.latent else d
    yield _kept("router.weight", "gate.weight", (moe.num_experts, width))
    yield _kept("router.bias", bias, (moe.num_experts,), released_fp32=True)
    bounds = _kept("router.bounds", bias, (2,), released_fp32=True)
    yield replace(bounds, form=Form.bounds, stored=(moe.num_experts,))
    yield _matrix("latent_down.weight", "routed_expert_down_proj.weight", (moe.latent_size, d))
    inward, outward = (moe.latent_size, moe.expert_ffn_size), (moe.expert_ffn_size, moe.latent_size)
    for part, theirs, shape in (("gate", "w1", inward), ("up", "w3", inward), ("down", "w2", outward)):
        yield Entry(
            ours=f"experts.{part}",
            shape=(moe.num_experts, *shape),
            fp32=False,
            released_fp32=False,
            form=Form.experts,
            name=f"experts.{{}}.{theirs}.weight",
            stored=(shape[1], shape[0]),
        )
    if moe.latent_norm:
        yield _kept("latent_norm.weight", "routed_expert_norm.weight", (moe.latent_size,))
    yield _matrix("latent_up.weight", "routed_expert_up_proj.weight", (d, moe.latent_size))
    if shared := moe.num_shared_experts * moe.shared_ffn_size:  # fused into one feed-forward in both
        yield from _under("shared.", "shared_experts.", _mlp(d, shared))


def _mtp(model: Model) -> Iterator[Entry]:
    """Names of DeepSeek-V3's MTP layer, since K3's release has none. Embedding and head are the model's."""
    d = model.hidden_size
    yield _kept("embedding_norm.weight", "enorm.weight", (d,))
    yield _kept("hidden_norm.weight", "hnorm.weight", (d,))
    yield replace(_matrix("projection.weight", "eh_proj.weight", (d, 2 * d)), form=Form.halves)
    yield _kept("attention_norm.weight", "input_layernorm.weight", (d,))
    yield from _under("attention.", "self_attn.", _mla(model))
    yield _kept("ffn_norm.weight", "post_attention_layernorm.weight", (d,))
    yield from _under("ffn.", "block_sparse_moe.", _moe(model))
    yield _kept("final_norm.weight", "shared_head.norm.weight", (d,))


def _mix(ours: str, theirs: str, d: int) -> Iterator[Entry]:
    yield _kept(f"{ours}.norm_weight", f"{theirs}_norm.weight", (d,))
    query = _kept(f"{ours}.query", f"{theirs}_proj.weight", (d,))
    yield replace(query, form=Form.row, stored=(1, d))


def _matrix(ours: str, theirs: str, shape: Shape) -> Entry:
    """A tensor in the model's precision."""
    return replace(_kept(ours, theirs, shape), fp32=False)


def _kept(ours: str, theirs: str, shape: Shape, *, released_fp32: bool = False) -> Entry:
    """A tensor that k3train keeps in fp32."""
    return Entry(
        ours=ours, shape=shape, fp32=True, released_fp32=released_fp32, form=Form.same, name=theirs,
        stored=shape,
    )  # fmt: skip


def _under(ours: str, theirs: str, entries: Iterable[Entry]) -> Iterator[Entry]:
    for entry in entries:
        yield replace(entry, ours=f"{ours}{entry.ours}", name=f"{theirs}{entry.name}")
