"""The short convolution with SiLU: k3train and fla-core."""

from __future__ import annotations

import torch

from k3train.bench.place import Case, Place, gradients
from k3train.bench.work import Shape
from k3train.kernels.packing import make_packing
from k3train.kernels.short_conv import short_conv


def case(by: str, s: Shape, place: Place) -> Case:
    """Documents of equal length, weights in fp32 as a model keeps them."""
    t, c, n = s["tokens"], s["channels"], s["documents"]
    x = place.randn(1, t, c)
    grad = torch.randn_like(x)
    borders = tuple(t * i // n for i in range(n + 1))
    if by == "k3train":
        weight = place.randn(c, s["width"], dtype=torch.float32, scale=0.5)
        packing = None
        if n > 1:
            packing = make_packing(borders, torch.ones(t, dtype=torch.bool), device=place.device)

        def run() -> torch.Tensor:
            return short_conv(x, weight, packing)

        return Case(forward=run, both=lambda: gradients(run(), [x, weight], grad))
    place.needs_gpu("fla-core's causal_conv1d")
    from fla.modules.causal_conv1d import causal_conv1d  # pyright: ignore[reportMissingImports]

    w = place.randn(c, s["width"], scale=0.5)
    cu = None if n == 1 else torch.tensor(borders, device=place.device)

    def peer() -> torch.Tensor:
        return causal_conv1d(x=x, weight=w, activation="silu", cu_seqlens=cu)[0]

    return Case(forward=peer, both=lambda: gradients(peer(), [x, w], grad))
