"""How much each chosen expert counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3train.backend.derivative import once_differentiable

_TINY = 1e-20


def route_weights(logits: Tensor, experts: Tensor) -> Tensor:
    """Sigmoids of the chosen ``logits`` over their sum (k3 report eq. 13): [n, k] in the logits' dtype.

    logits [n, all experts]; ``experts`` int64 [n, k], no expert twice in a row. In fp32 on a GPU one kernel
    in each direction.
    """
    if logits.is_cuda and logits.dtype is torch.float32 and logits.numel():
        return _RouteWeights.apply(logits, experts)  # pyright: ignore[reportReturnType]
    chosen = torch.sigmoid(logits.gather(-1, experts))
    return chosen / (chosen.sum(-1, keepdim=True) + _TINY)


class _RouteWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, experts: Tensor) -> Tensor:
        from k3train.router import triton_router

        ctx.save_for_backward(logits, experts)
        return triton_router.weights(logits, experts, _TINY)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        from k3train.router import triton_router

        logits, experts = ctx.saved_tensors
        return triton_router.weights_backward(grads[0].contiguous(), logits, experts, _TINY), None
