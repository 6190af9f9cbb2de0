"""Attention residuals: k3train, fla-core and NeMo Automodel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3train.bench.place import Case, Place, gradients
from k3train.bench.work import Shape
from k3train.kernels.attn_res import mix

EPS = 1e-5


def case(by: str, s: Shape, place: Place) -> Case:
    """Sources of unit variance, a query that tells them apart."""
    n, c = s["tokens"], s["hidden"]
    sources = [place.randn(n, c) for _ in range(s["sources"])]
    query = place.randn(c, dtype=torch.float32, scale=c**-0.5)
    weight = torch.ones(c, device=place.device, requires_grad=True)
    grad = torch.randn_like(sources[0])
    if by == "k3train":
        return _case(lambda: mix(sources, query, weight, EPS), [*sources, query, weight], grad)
    place.needs_gpu("its Triton kernel")
    if by == "fla":
        from fla.ops.attnres import fused_attnres  # pyright: ignore[reportMissingImports]

        return _case(
            lambda: fused_attnres(query, sources, weight, rms_eps=EPS), [*sources, query, weight], grad
        )
    from nemo_automodel.components.models.kimi_k3 import situ  # pyright: ignore[reportMissingImports]

    situ._enable_attn_res_triton()
    blocks = torch.stack([x.detach() for x in sources[:-1]], 1).requires_grad_()
    prefix, small = sources[-1], [x.detach().to(place.dtype).requires_grad_() for x in (weight, query)]
    run = situ._AttnResTritonFunction.apply
    return _case(lambda: run(prefix, blocks, *small, EPS), [prefix, blocks, *small], grad)


def _case(run: Any, inputs: list[Tensor], grad: Tensor) -> Case:
    return Case(forward=run, both=lambda: gradients(run(), inputs, grad))
