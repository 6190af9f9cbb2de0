"""The router: k3train's with its counts, megatron-core's quantile mode, Automodel's gate."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from k3train.bench.place import Case, Place, gradients, world
from k3train.bench.work import Shape
from k3train.config import schema


def case(by: str, s: Shape, place: Place) -> Case:
    """Random tokens and weights; the scores decide, so routing is natural."""
    x = place.randn(s["tokens"], s["hidden"])
    weight = place.randn(s["experts"], s["hidden"], dtype=torch.float32, scale=s["hidden"] ** -0.5)
    make = {"k3train": _ours, "megatron": _megatron, "automodel": _automodel}[by]
    made = make(x, weight, s, place)
    made.routing = "natural"
    return made


def _ours(x: Tensor, weight: Tensor, s: Shape, place: Place) -> Case:
    world(place.device)
    from megatron.core.transformer.transformer_config import TransformerConfig

    from k3train.router.logits import router_logits
    from k3train.router.router import K3Router
    from k3train.router.select import Tally, select, select_reference

    config = TransformerConfig(
        num_layers=1,
        hidden_size=s["hidden"],
        num_attention_heads=1,
        num_moe_experts=s["experts"],
        moe_router_topk=s["top_k"],
        use_cpu_initialization=place.device.type == "cpu",
        perform_initialization=False,
    )
    settings = schema.Router(quantile=schema.Quantile(bins=s["bins"]))
    router = K3Router(config, 1, settings=settings)
    with torch.no_grad():
        router.weight.copy_(weight)
    grad = torch.randn(s["tokens"], s["top_k"], device=place.device)
    logits = router_logits(x, weight).detach()
    tally = Tally(router.loads, router.rule.histogram, router.bounds, None)

    def counting() -> Any:
        with torch.enable_grad():  # only passes with gradients are counted
            return router(x)

    def update() -> Any:
        return router.rule.next_bias(router.bias, router.bounds, router.loads, router.rule.statistics())

    return Case(
        forward=counting,
        both=lambda: gradients(router(x).weights, [x, router.weight], grad),
        parts={
            "selection and counts alone": lambda: select(logits, router.bias, s["top_k"], tally),
            "the same in separate kernels": lambda: select_reference(logits, router.bias, s["top_k"], tally),
            "update of the bias, once a layer and step": update,
        },
        note="forward with its graph: routers count only then",
    )


def _megatron(x: Tensor, weight: Tensor, s: Shape, place: Place) -> Case:
    world(place.device)
    from megatron.core.transformer.moe.moe_utils import (
        qb_dual_update,
        router_gating_linear,
        topk_routing_with_score_function,
    )

    k, bias = s["top_k"], torch.zeros(s["experts"], device=place.device)
    whole = s["experts"] // math.gcd(s["experts"], k)
    used = s["tokens"] - s["tokens"] % whole

    def run() -> Tensor:
        logits = router_gating_linear(x, weight, None, torch.float32)[:used]
        chosen, _ = qb_dual_update(logits.detach(), k, bias, update_beta=True)
        return topk_routing_with_score_function(
            logits, k, score_function="sigmoid", precomputed_indices=chosen
        )[0]

    note = "dense probabilities"
    if used < s["tokens"]:
        note += f"; its quantile takes {used} of the tokens, a whole number for each expert"
    return Case(forward=run, both=lambda: gradients(run(), [x, weight]), note=note)


def _automodel(x: Tensor, weight: Tensor, s: Shape, place: Place) -> Case:
    place.needs_gpu("its package")
    from nemo_automodel.components.models.kimi_k3 import (  # pyright: ignore[reportMissingImports]
        config,
        model,
    )

    sizes = {"num_experts": s["experts"], "num_experts_per_token": s["top_k"], "hidden_size": s["hidden"]}
    settings = model._build_moe_config(config.KimiK3TextConfig(**sizes), place.dtype, None)
    gate = model.KimiK3Gate(settings, gate_precision=torch.float32).to(place.device)
    with torch.no_grad():
        gate.weight.copy_(weight)
    mask = torch.ones(s["tokens"], dtype=torch.bool, device=place.device)

    def run() -> Tensor:
        return gate(x, mask)[0]

    grad = torch.randn(s["tokens"], s["top_k"], device=place.device)
    return Case(
        forward=run,
        both=lambda: gradients(run(), [x, gate.weight], grad),
        note="no counts, no balance",
    )
