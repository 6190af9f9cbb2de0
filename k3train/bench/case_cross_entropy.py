"""Cross entropy from hidden states: k3train, fla-core, NeMo Automodel, megatron-core."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3train.bench.place import Case, Place, gradients, world
from k3train.bench.work import Shape
from k3train.kernels.cross_entropy import cross_entropy


def case(by: str, s: Shape, place: Place) -> Case:
    """Mean over tokens, of random labels."""
    x = place.randn(s["tokens"], s["hidden"])
    weight = place.randn(s["vocab"], s["hidden"], scale=s["hidden"] ** -0.5)
    labels = torch.randint(s["vocab"], (s["tokens"],), device=place.device, generator=place.generator)
    if by == "k3train":
        return _ours(x, weight, labels, place)
    run, note = {"fla": _fla, "automodel": _automodel, "megatron": _megatron}[by](x, weight, labels, place)
    return Case(forward=run, both=lambda: gradients(run(), [x, weight]), note=note)


def _ours(x: Tensor, weight: Tensor, labels: Tensor, place: Place) -> Case:
    group = world(place.device)

    def loss(*, keep: bool) -> Tensor:
        return cross_entropy(x, weight, labels, group, keep=keep).mean()

    def both(*, keep: bool) -> tuple[Tensor, ...]:
        return gradients(loss(keep=keep), [x, weight])

    return Case(
        forward=lambda: loss(keep=True),
        both=lambda: both(keep=True),
        trained={"forward + backward, logits made twice": lambda: lambda: both(keep=False)},
        note="logits kept, as in training without recomputation, where not said otherwise",
    )


def _megatron(x: Tensor, weight: Tensor, labels: Tensor, place: Place) -> Any:
    group = world(place.device)
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    def run() -> Tensor:
        logits = (x @ weight.T)[:, None]
        return fused_vocab_parallel_cross_entropy(logits, labels[:, None], group).mean()

    return run, "all logits at once"


def _fla(x: Tensor, weight: Tensor, labels: Tensor, place: Place) -> Any:
    place.needs_gpu("its Triton kernel")
    from fla.modules.fused_linear_cross_entropy import (  # pyright: ignore[reportMissingImports]
        fused_linear_cross_entropy_loss,
    )

    return (
        lambda: fused_linear_cross_entropy_loss(x, labels, weight),
        "makes its gradients in the forward pass",
    )


def _automodel(x: Tensor, weight: Tensor, labels: Tensor, place: Place) -> Any:
    place.needs_gpu("its package")
    from nemo_automodel.components.loss.chunked_ce import (  # pyright: ignore[reportMissingImports]
        ChunkedCrossEntropy,
    )

    loss = ChunkedCrossEntropy(reduction="mean")
    return lambda: loss(x, labels, weight), f"chunks of {loss.chunk_len} tokens, made twice"
