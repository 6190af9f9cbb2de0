"""RMSNorm as Triton kernels. Import only where a GPU is: this imports Triton.

One program holds all channels of a row. Legend: n rows, c channels.
"""

# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3train.kernels.triton_partial import add_up

_PROGRAMS = 528
"""Programs of the backward pass; each leaves one partial sum of the weight's gradient."""


def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Normed [n, c] in x's dtype and fp32 [n], 1 / rms; x has unit channel stride."""
    n, c = x.shape
    out = torch.empty(n, c, dtype=x.dtype, device=x.device)
    scale = torch.empty(n, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(c)
    if n:
        _rms_norm_forward[(n,)](
            x, x.stride(0), weight, out, scale, c, eps, BLOCK=block, num_warps=max(1, min(16, block // 512))
        )
    return out, scale


def backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x [n, c] and of weight, fp32 [c]."""
    n, c = x.shape
    programs = max(1, min(n, _PROGRAMS))
    partial = torch.empty(programs, c, dtype=torch.float32, device=x.device)
    grad_x = torch.empty(n, c, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(c)
    _rms_norm_backward[(programs,)](
        grad,
        grad.stride(0),
        x,
        x.stride(0),
        weight,
        scale,
        grad_x,
        partial,
        n,
        c,
        BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
    )
    return grad_x, add_up(partial)


@triton.jit
def _rms_norm_forward(x, stride, weight, out, scale, channels, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < channels
    v = tl.load(x + row * stride + channel, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + channel, mask=inside, other=0.0)
    s = tl.rsqrt(tl.sum(v * v) / channels + eps)
    tl.store(out + row * channels + channel, (v * s * w).to(out.dtype.element_ty), mask=inside)
    tl.store(scale + row, s)


@triton.jit
def _rms_norm_backward(
    grad, grad_stride, x, stride, weight, scale, grad_x, partial, n, channels, BLOCK: tl.constexpr
):
    channel = tl.arange(0, BLOCK)
    inside = channel < channels
    w = tl.load(weight + channel, mask=inside, other=0.0)
    grad_w = tl.zeros([BLOCK], tl.float32)
    at = tl.program_id(0).to(tl.int64)
    while at < n:
        s = tl.load(scale + at)
        normed = tl.load(x + at * stride + channel, mask=inside, other=0.0).to(tl.float32) * s
        g = tl.load(grad + at * grad_stride + channel, mask=inside, other=0.0).to(tl.float32)
        grad_w += g * normed
        g = g * w
        d = s * (g - normed * (tl.sum(g * normed) / channels))
        tl.store(grad_x + at * channels + channel, d.to(grad_x.dtype.element_ty), mask=inside)
        at += tl.num_programs(0)
    tl.store(partial + tl.program_id(0) * channels + channel, grad_w, mask=inside)
