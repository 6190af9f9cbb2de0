"""SiTU-GLU with the router's weight: k3train and NeMo Automodel."""

from __future__ import annotations

import torch

from k3train.bench.place import Case, Place, gradients
from k3train.bench.work import Shape
from k3train.kernels.situ import situ_glu

GATE_CAP, UP_CAP = 4.0, 25.0


def case(by: str, s: Shape, place: Place) -> Case:
    """Gate and up of unit variance, a weight for each row."""
    rows, c = s["rows"], s["channels"]
    grad = place.randn(rows, c, grad=False)
    weight = torch.rand(rows, device=place.device, generator=place.generator).requires_grad_()
    if by == "k3train":
        gate, up = place.randn(rows, c), place.randn(rows, c)

        def run() -> torch.Tensor:
            return situ_glu(gate, up, GATE_CAP, UP_CAP, weight)

        return Case(forward=run, both=lambda: gradients(run(), [gate, up, weight], grad))
    place.needs_gpu("its Triton kernel")
    from nemo_automodel.components.models.kimi_k3 import situ  # pyright: ignore[reportMissingImports]

    situ._enable_situ_triton(fast_math=True)
    both, column = place.randn(rows, 2 * c), weight.detach()[:, None].requires_grad_()

    def peer() -> torch.Tensor:
        return situ._weighted_situ(both, column, beta=GATE_CAP, linear_beta=UP_CAP)

    return Case(forward=peer, both=lambda: gradients(peer(), [both, column], grad), note="fast math")
