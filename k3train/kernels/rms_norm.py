"""RMSNorm whose weight and arithmetic stay fp32 while activations may be bf16."""

from __future__ import annotations

import torch
from torch import Tensor

from k3train.backend.derivative import once_differentiable

FUSED_CHANNELS = 16384
"""Widest row that the GPU kernel takes; wider ones take plain torch."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dim, in fp32 or better.

    x [..., c], weight [c]; the result has x's dtype. Backward keeps x and one fp32 number per row.
    """
    out = _RmsNorm.apply(x, weight, eps)
    assert isinstance(out, Tensor)
    return out


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if fits_row_kernel(x):
            from k3train.kernels import triton_rms_norm

            out, scale = triton_rms_norm.forward(as_rows(x), weight, eps)
            ctx.save_for_backward(x, weight, scale)
            return out.view(x.shape)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale * weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        if fits_row_kernel(x):
            from k3train.kernels import triton_rms_norm

            grad_x, grad_weight = triton_rms_norm.backward(as_rows(grad), as_rows(x), weight, scale)
            return grad_x.view(x.shape), grad_weight, None
        normed = x.to(scale.dtype) * scale
        grad = grad.to(scale.dtype)
        grad_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        grad = grad * weight
        grad_x = scale * (grad - normed * (grad * normed).mean(-1, keepdim=True))
        return grad_x.to(x.dtype), grad_weight, None


def fits_row_kernel(x: Tensor) -> bool:
    """Whether a GPU kernel that holds a whole row of ``x`` [..., c] in one program applies."""
    return x.is_cuda and x.dtype is not torch.float64 and x.shape[-1] <= FUSED_CHANNELS and x.numel() > 0


def as_rows(x: Tensor) -> Tensor:
    """[..., c] -> [n, c] with unit channel stride."""
    x = x.flatten(0, -2)
    return x if x.stride(-1) == 1 else x.contiguous()
