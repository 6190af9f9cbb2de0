"""Every parameter of a model by name, shape and dtype, without building it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from k3train.config.schema import Model
from k3train.plan.counts import is_mla


@dataclass(frozen=True, slots=True)
class Parameter:
    """One trained tensor of the whole model, as a checkpoint names it."""

    name: str
    shape: tuple[int, ...]
    """Over all ranks; experts are stacked in the first axis."""
    fp32: bool = False
    """Whether it is fp32 even in a bf16 model."""

    @property
    def local_name(self) -> str:
        """The name without the layer it is in: ``attention.q_proj.weight``."""
        return local_name(self.name)


def local_name(name: str) -> str:
    """A parameter's name within its decoder or MTP layer; outside of layers, the name itself."""
    first, _, rest = name.partition(".")
    if first == "layers":
        return rest.partition(".")[2]
    return rest if first == "mtp" else name


def parameters(model: Model) -> Iterator[Parameter]:
    """Every trained tensor, in the order of the layers. Selection biases of routers are not trained."""
    d = model.hidden_size
    yield Parameter("embedding.weight", (model.vocab_size, d))
    for layer in range(model.num_layers):
        yield from _decoder_layer(model, layer)
    yield from _depth_mix("output_mix", d)
    yield _vector("final_norm.weight", d)
    yield Parameter("output_head.weight", (model.vocab_size, d))
    if model.mtp.num_layers:
        yield from _mtp(model)


def _decoder_layer(model: Model, layer: int) -> Iterator[Parameter]:
    d, at = model.hidden_size, f"layers.{layer}"
    yield from _depth_mix(f"{at}.attention_mix", d)
    yield _vector(f"{at}.attention_norm.weight", d)
    yield from (_mla if is_mla(model, layer) else _kda)(model, f"{at}.attention")
    yield from _depth_mix(f"{at}.ffn_mix", d)
    yield _vector(f"{at}.ffn_norm.weight", d)
    if layer < model.num_dense_layers:
        yield from _ffn(model, f"{at}.ffn", model.dense_ffn_size)
    else:
        yield from _moe(model, f"{at}.ffn")


def _kda(model: Model, at: str) -> Iterator[Parameter]:
    d, heads, kda = model.hidden_size, model.num_heads, model.kda
    width = heads * kda.head_dim
    for name in ("q_proj", "k_proj", "v_proj", "g_proj"):
        yield Parameter(f"{at}.{name}.weight", (width, d))
    yield Parameter(f"{at}.b_proj.weight", (heads, d))
    yield Parameter(f"{at}.f_a.weight", (kda.decay_rank, d))
    yield Parameter(f"{at}.f_b.weight", (width, kda.decay_rank))
    yield Parameter(f"{at}.o_proj.weight", (d, width))
    yield _vector(f"{at}.A_log", heads)
    yield _vector(f"{at}.dt_bias", width)
    for name in ("q_conv", "k_conv", "v_conv"):
        yield Parameter(f"{at}.{name}", (width, kda.conv_kernel), fp32=True)
    yield _vector(f"{at}.o_norm", kda.head_dim)


def _mla(model: Model, at: str) -> Iterator[Parameter]:
    d, heads, mla = model.hidden_size, model.num_heads, model.mla
    yield Parameter(f"{at}.q_a.weight", (mla.q_lora_rank, d))
    yield _vector(f"{at}.q_a_norm.weight", mla.q_lora_rank)
    yield Parameter(f"{at}.q_b.weight", (heads * (mla.qk_head_dim + mla.qk_shared_head_dim), mla.q_lora_rank))
    yield Parameter(f"{at}.kv_a.weight", (mla.kv_lora_rank + mla.qk_shared_head_dim, d))
    yield _vector(f"{at}.kv_a_norm.weight", mla.kv_lora_rank)
    yield Parameter(f"{at}.kv_b.weight", (heads * (mla.qk_head_dim + mla.v_head_dim), mla.kv_lora_rank))
    yield Parameter(f"{at}.g_proj.weight", (heads * mla.v_head_dim, d))
    yield Parameter(f"{at}.o_proj.weight", (d, heads * mla.v_head_dim))


def _ffn(model: Model, at: str, size: int) -> Iterator[Parameter]:
    yield Parameter(f"{at}.gate_proj.weight", (size, model.hidden_size))
    yield Parameter(f"{at}.up_proj.weight", (size, model.hidden_size))
    yield Parameter(f"{at}.down_proj.weight", (model.hidden_size, size))


def _moe(model: Model, at: str) -> Iterator[Parameter]:
    d, moe = model.hidden_size, model.moe
    yield Parameter(f"{at}.router.weight", (moe.num_experts, d), fp32=True)
    yield Parameter(f"{at}.latent_down.weight", (moe.latent_size, d))
    for name in ("gate", "up"):
        yield Parameter(f"{at}.experts.{name}", (moe.num_experts, moe.latent_size, moe.expert_ffn_size))
    yield Parameter(f"{at}.experts.down", (moe.num_experts, moe.expert_ffn_size, moe.latent_size))
    if moe.latent_norm:
        yield _vector(f"{at}.latent_norm.weight", moe.latent_size)
    yield Parameter(f"{at}.latent_up.weight", (d, moe.latent_size))
    shared = moe.num_shared_experts * moe.shared_ffn_size
    if shared:
        yield from _ffn(model, f"{at}.shared", shared)


def _mtp(model: Model) -> Iterator[Parameter]:
    """One MLA + MoE layer whose residual is a plain sum, so it has no mixes over depth."""
    d = model.hidden_size
    for name in ("hidden_norm", "embedding_norm"):
        yield _vector(f"mtp.{name}.weight", d)
    yield Parameter("mtp.projection.weight", (d, 2 * d))
    yield _vector("mtp.attention_norm.weight", d)
    yield from _mla(model, "mtp.attention")
    yield _vector("mtp.ffn_norm.weight", d)
    yield from _moe(model, "mtp.ffn")
    yield _vector("mtp.final_norm.weight", d)


def _depth_mix(at: str, size: int) -> Iterator[Parameter]:
    yield _vector(f"{at}.query", size)
    yield _vector(f"{at}.norm_weight", size)


def _vector(name: str, size: int) -> Parameter:
    return Parameter(name, (size,), fp32=True)
