"""The routed experts, from tokens and their routes to tokens: k3train, Automodel, megatron-core."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from k3train.bench.place import Case, Place, alone, gradients
from k3train.bench.work import Shape
from k3train.config import schema


def case(by: str, s: Shape, place: Place) -> Case:
    """Routes are the top of random scores: a natural, slightly uneven load."""
    n, e, k = s["tokens"], s["experts"], s["top_k"]
    scores = torch.rand(n, e, device=place.device, generator=place.generator)
    chosen = scores.topk(k, dim=-1)
    weights = chosen.values / chosen.values.sum(-1, keepdim=True)
    x, grad = place.randn(n, s["latent"]), place.randn(n, s["latent"], grad=False)
    make = {"k3train": _ours, "megatron": _megatron, "automodel": _automodel}[by]
    run, parameters, note = make(x, chosen.indices, weights, s, place)
    return Case(
        forward=run,
        both=lambda: gradients(run(), [x, *parameters], grad),
        routing="natural",
        note=note,
    )


def _config(s: Shape, place: Place) -> Any:
    moe = schema.Moe(
        num_experts=s["experts"], top_k=s["top_k"], expert_ffn_size=s["ffn"], latent_size=s["latent"]
    )
    precision = schema.Precision.bf16 if place.dtype is torch.bfloat16 else schema.Precision.fp32
    model = schema.Model(hidden_size=s["latent"], num_heads=1, moe=moe, precision=precision)
    return alone(model, place.device)


def _ours(x: Tensor, chosen: Tensor, weights: Tensor, s: Shape, place: Place) -> Any:
    from k3train.model.dispatch import make_dispatch
    from k3train.model.experts import Experts
    from k3train.router.router import Routes

    one = _config(s, place)
    experts = Experts(one.config, one.groups.pg)
    dispatch = make_dispatch(one.config, one.groups.pg)

    def run() -> Tensor:
        rows, counts, scales = dispatch.dispatch(x, Routes(chosen, weights))
        return dispatch.combine(experts(rows, counts, scales))

    return run, list(experts.parameters()), "SiTU-GLU"


def _megatron(x: Tensor, chosen: Tensor, weights: Tensor, s: Shape, place: Place) -> Any:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_utils import permute, unpermute
    from megatron.core.transformer.transformer_config import TransformerConfig

    groups = _config(s, place).groups
    config = TransformerConfig(
        num_layers=1,
        hidden_size=s["latent"],
        num_attention_heads=1,
        num_moe_experts=s["experts"],
        moe_router_topk=s["top_k"],
        ffn_hidden_size=s["ffn"],
        moe_ffn_hidden_size=s["ffn"],
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bf16=place.dtype is torch.bfloat16,
        params_dtype=place.dtype,
        use_cpu_initialization=place.device.type == "cpu",
    )
    parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    experts = SequentialMLP(s["experts"], config, parts, groups.pg).to(place.device)
    shape = x.shape[0], s["experts"]
    probabilities = torch.zeros(shape, device=place.device).scatter(1, chosen, weights)
    table = torch.zeros(shape, dtype=torch.bool, device=place.device).scatter(1, chosen, True)
    counts = table.sum(0)

    def run() -> Tensor:
        rows, scales, order, *_ = permute(x, table, probabilities, num_out_tokens=chosen.numel())
        out, _ = experts(rows, counts, scales)
        return unpermute(out, order, x.shape, routing_map=table)

    return run, list(experts.parameters()), "SwiGLU; one product after another"


def _automodel(x: Tensor, chosen: Tensor, weights: Tensor, s: Shape, place: Place) -> Any:
    place.needs_gpu("its package")
    from nemo_automodel.components.models.common import (  # pyright: ignore[reportMissingImports]
        BackendConfig,
    )
    from nemo_automodel.components.models.kimi_k3 import (  # pyright: ignore[reportMissingImports]
        config,
        model,
        situ,
    )
    from nemo_automodel.components.moe.experts import (  # pyright: ignore[reportMissingImports]
        GroupedExperts,
    )

    sizes = {
        "num_experts": s["experts"],
        "num_experts_per_token": s["top_k"],
        "moe_intermediate_size": s["ffn"],
        "routed_expert_hidden_size": s["latent"],
    }
    settings = model._build_moe_config(config.KimiK3TextConfig(**sizes), place.dtype, None)
    backend = BackendConfig(experts="torch_mm", dispatcher="torch", compile_router_weight=True)
    situ._enable_situ_triton(fast_math=True)
    with place.device:
        experts = GroupedExperts(settings, backend=backend)
    experts.expert_activation_grouped = partial(situ._weighted_situ, beta=4.0, linear_beta=25.0)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    mask = torch.ones(x.shape[0], dtype=torch.bool, device=place.device)

    def run() -> Tensor:
        return experts(x, mask, weights, chosen)

    return run, list(experts.parameters()), "SiTU-GLU in Triton; weight after the down-projection"
