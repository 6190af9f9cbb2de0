"""RMSNorm over the last axis times a sigmoid gate: the output of a Kimi Delta Attention head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3train.backend.derivative import once_differentiable
from k3train.kernels.rms_norm import as_rows


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """sigmoid(gate) * weight * x / sqrt(mean(x^2) + eps), k3 report section 2.1.

    ``x`` and ``gate`` [..., d], ``weight`` [d]. Computed in fp32 (fp64 for fp64 input), returned in the dtype
    of ``x``. Keeps only its inputs for the backward pass.
    """
    return _GatedRmsNorm.apply(x, weight, gate, eps)  # pyright: ignore


class _GatedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight, gate)
        ctx.eps = eps
        if _is_fused(x, gate):
            from k3train.kernels import triton_gated_norm

            return triton_gated_norm.forward(_rows(x), weight, _tokens(gate), eps).view(x.shape)
        unit, _, opening, w = _parts(x, weight, gate, eps)
        return unit.mul_(w).mul_(opening).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gate = ctx.saved_tensors
        if _is_fused(x, gate):
            from k3train.kernels import triton_gated_norm

            rows = (_rows(x), weight, _tokens(gate))
            grad_x, grad_weight, grad_gate = triton_gated_norm.backward(_rows(grad), *rows, ctx.eps)
            return grad_x.view(x.shape), grad_weight, grad_gate.view(gate.shape), None
        unit, rate, opening, w = _parts(x, weight, gate, ctx.eps)
        along = grad.to(unit.dtype) * opening
        product = along * unit
        grad_weight = product.flatten(0, -2).sum(0)
        product *= w
        grad_gate = product * (1 - opening)
        mean = product.mean(-1, keepdim=True)
        grad_x = (along * w).sub_(unit * mean).mul_(rate)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), grad_gate.to(gate.dtype), None


def _is_fused(x: Tensor, gate: Tensor) -> bool:
    """One kernel in the place of some ten passes over memory."""
    d = x.shape[-1]
    return x.is_cuda and x.dtype is gate.dtype is torch.bfloat16 and d & (d - 1) == 0 and x.numel() > 0


def _rows(x: Tensor) -> Tensor:
    """[..., d] -> [n, d], contiguous."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def _tokens(x: Tensor) -> Tensor:
    """[..., h, d] -> [n, h * d], without a copy where a token's heads lie together."""
    return as_rows(x.flatten(-2)) if x.dim() > 2 else as_rows(x)


def _parts(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x / rms(x), 1 / rms(x), sigmoid(gate) and the weight, all in the computing dtype."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    wide = x.to(dtype)
    rate = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide * rate, rate, torch.sigmoid(gate.to(dtype)), weight.to(dtype)
