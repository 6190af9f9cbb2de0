"""Parameters and FLOPs of the text model, from its settings alone. No torch.

One set of formulas serves the planner, the metrics and the tests. For Kimi K3 it gives the text parameters of
the released checkpoint exactly: A_log without its padding, the router's selection bias included.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3train.config.schema import Model, RouterInput

KDA_CHUNK_TOKENS = 64
"""Tokens that the chunked form of KDA multiplies at once; enters its FLOPs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One kind of part, over the whole model."""

    total: int
    """Parameters."""
    active: int
    """Parameters that one token uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Parameters of a model."""

    total: int
    active: int
    """Parameters that one token uses: its experts and the output head, but not the embedding."""
    components: dict[str, Component]
    """By kind of part; they add up to total and active."""


def is_mla(model: Model, layer: int) -> bool:
    """Whether decoder layer ``layer`` (from 0) is gated MLA; otherwise it is KDA."""
    if model.mla_layers is not None:
        return layer in model.mla_layers
    return (layer + 1) % model.mla_every == 0 or layer == model.num_layers - 1


def mla_layers(model: Model) -> list[int]:
    """Gated MLA layers, from 0, ascending."""
    return [layer for layer in range(model.num_layers) if is_mla(model, layer)]


def kda_layers(model: Model) -> list[int]:
    """KDA layers, from 0, ascending."""
    return [layer for layer in range(model.num_layers) if not is_mla(model, layer)]


def count_parameters(model: Model) -> Counts:
    """Parameters by component, over all ranks."""
    d, layers = model.hidden_size, model.num_layers
    num_mla, num_moe = len(mla_layers(model)), layers - model.num_dense_layers
    used = model.moe.top_k
    components = {
        "embedding": Component(total=model.vocab_size * d, active=0),
        "head": _always(model.vocab_size * d),
        "kda": _always((layers - num_mla) * kda_parameters(model)),
        "mla": _always(num_mla * mla_parameters(model)),
        "dense_ffn": _always(model.num_dense_layers * 3 * d * model.dense_ffn_size),
        "routed_experts": Component(
            total=num_moe * model.moe.num_experts * expert_parameters(model),
            active=num_moe * used * expert_parameters(model),
        ),
        "shared_experts": _always(num_moe * shared_expert_parameters(model)),
        "latent": _always(num_moe * latent_parameters(model)),
        "router": _always(num_moe * router_parameters(model)),
        "norms": _always(layers * 2 * d + d),
        # A norm and a query before each sublayer and before the head.
        "attn_res": _always((2 * layers + 1) * 2 * d),
    }
    if model.mtp.num_layers:
        components["mtp"] = _mtp(model)
    return Counts(
        total=sum(part.total for part in components.values()),
        active=sum(part.active for part in components.values()),
        components=components,
    )


def kda_parameters(model: Model) -> int:
    """One KDA sublayer without the norm before it."""
    d, heads, kda = model.hidden_size, model.num_heads, model.kda
    width = heads * kda.head_dim
    projections = 5 * d * width  # q, k, v, output gate, output
    decay = d * kda.decay_rank + kda.decay_rank * width + width + heads  # low rank, dt_bias, A_log
    return (
        projections + decay + d * heads + 3 * width * kda.conv_kernel + kda.head_dim
    )  # beta, convolutions, norm


def mla_parameters(model: Model) -> int:
    """One gated MLA sublayer without the norm before it."""
    d, heads, mla = model.hidden_size, model.num_heads, model.mla
    query = d * mla.q_lora_rank + mla.q_lora_rank
    query += mla.q_lora_rank * heads * (mla.qk_head_dim + mla.qk_shared_head_dim)
    latent = d * (mla.kv_lora_rank + mla.qk_shared_head_dim) + mla.kv_lora_rank
    latent += mla.kv_lora_rank * heads * (mla.qk_head_dim + mla.v_head_dim)
    return query + latent + 2 * d * heads * mla.v_head_dim  # output gate and output


def expert_parameters(model: Model) -> int:
    """One routed expert: gate, up and down in the latent width."""
    return 3 * model.moe.latent_size * model.moe.expert_ffn_size


def shared_expert_parameters(model: Model) -> int:
    """All shared experts of one layer."""
    return 3 * model.hidden_size * model.moe.num_shared_experts * model.moe.shared_ffn_size


def latent_parameters(model: Model) -> int:
    """Projections into the experts' latent and back, and the latent norm, of one layer."""
    norm = model.moe.latent_size if model.moe.latent_norm else 0
    return 2 * model.hidden_size * model.moe.latent_size + norm


def router_parameters(model: Model) -> int:
    """Router weight and selection bias of one layer."""
    return (router_input_size(model) + 1) * model.moe.num_experts


def router_input_size(model: Model) -> int:
    """Width that the router reads."""
    latent = model.moe.router.input is RouterInput.latent
    return model.moe.latent_size if latent else model.hidden_size


def train_flops_per_token(model: Model, context: float) -> float:
    """Forward and backward FLOPs of one token in a document of ``context`` tokens.

    Counts multiplications by weights, MLA's causal attention and KDA's chunked recurrence; a multiply-add
    is 2 and the backward is twice the forward. Left out: recomputation, norms, activations and the mix of
    attention residuals, which are bound by memory. It is linear in ``context``: of documents of several
    lengths n_i, sum n_i^2 / sum n_i gives the mean.
    """
    forward = sum(layer_flops(model, layer, context) for layer in range(model.num_layers)) + head_flops(model)
    if model.mtp.num_layers:
        forward += mtp_layer_flops(model, context) + head_flops(model)
    return 3.0 * forward


def head_flops(model: Model) -> float:
    """Forward FLOPs of one token in the output head."""
    return 2.0 * model.vocab_size * model.hidden_size


def mtp_layer_flops(model: Model, context: float) -> float:
    """Forward FLOPs of one token in the MTP layer, without the output head that it shares."""
    return mtp_attention_flops(model, context) + _moe_flops(model)


def mtp_attention_flops(model: Model, context: float) -> float:
    """The part of ``mtp_layer_flops`` that is not its experts."""
    return 2 * mla_parameters(model) + _mla_core_flops(model, context) + 2 * 2 * model.hidden_size**2


def layer_flops(model: Model, layer: int, context: float) -> float:
    """Forward FLOPs of one token in decoder layer ``layer``, as ``train_flops_per_token`` counts them."""
    return attention_flops(model, layer, context) + ffn_flops(model, layer)


def attention_flops(model: Model, layer: int, context: float) -> float:
    """The part of ``layer_flops`` that KDA or MLA has in it."""
    if is_mla(model, layer):
        return 2 * mla_parameters(model) + _mla_core_flops(model, context)
    return 2 * kda_parameters(model) + _kda_core_flops(model)


def ffn_flops(model: Model, layer: int) -> float:
    """The part of ``layer_flops`` that the dense feed-forward or the experts have in it."""
    dense = layer < model.num_dense_layers
    return 2.0 * 3 * model.hidden_size * model.dense_ffn_size if dense else _moe_flops(model)


def up_projection_flops(model: Model, mla: bool) -> float:
    """Forward FLOPs of one token in what selective recomputation multiplies again: MLA's two up-projections
    or the one that makes KDA's decay."""
    if not mla:
        return 2.0 * model.kda.decay_rank * model.num_heads * model.kda.head_dim
    query = model.mla.q_lora_rank * (model.mla.qk_head_dim + model.mla.qk_shared_head_dim)
    latent = model.mla.kv_lora_rank * (model.mla.qk_head_dim + model.mla.v_head_dim)
    return 2.0 * model.num_heads * (query + latent)


def _moe_flops(model: Model) -> float:
    routed = model.moe.top_k * expert_parameters(model)
    others = shared_expert_parameters(model) + latent_parameters(model) + router_parameters(model)
    return 2.0 * (routed + others)


def _mla_core_flops(model: Model, context: float) -> float:
    """A token sees half of the document on average, at 2 FLOPs per key and query or value channel."""
    mla = model.mla
    return float(context * model.num_heads * (mla.qk_head_dim + mla.qk_shared_head_dim + mla.v_head_dim))


def _kda_core_flops(model: Model) -> float:
    """Chunked delta rule, per head: 6 d^2 for the state, 3 C d for a tile's products, C^2 for its inverse."""
    d, chunk = model.kda.head_dim, KDA_CHUNK_TOKENS
    return float(model.num_heads * (6 * d * d + 3 * chunk * d + chunk * chunk))


def _always(parameters: int) -> Component:
    return Component(total=parameters, active=parameters)


def _mtp(model: Model) -> Component:
    """Two norms and a projection that join hidden state and next token, an MLA + MoE layer, its final norm.

    Embedding and head are the model's own.
    """
    d = model.hidden_size
    always = mla_parameters(model) + shared_expert_parameters(model) + latent_parameters(model)
    always += router_parameters(model) + 2 * d * d + 5 * d
    expert = expert_parameters(model)
    return Component(
        total=always + model.moe.num_experts * expert,
        active=always + model.moe.top_k * expert,
    )
