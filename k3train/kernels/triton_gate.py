"""The sigmoid gate as Triton kernels. Import only where a GPU is: this imports Triton.

Legend: n rows of c channels, whose rows may be longer than that.
"""

# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportReturnType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3train.kernels.triton_math import sigmoid

_BLOCK = 2048
"""Channels that a program works on."""


def forward(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate) [n, c], in the dtype of ``gate``."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        grid, block = _grid(x)
        _gate_forward[grid](x, x.stride(0), gate, gate.stride(0), out, x.shape[1], BLOCK=block)
    return out


def backward(grad: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and gate, [n, c]."""
    grad_x, grad_gate = (torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in (x, gate))
    if x.numel():
        grid, block = _grid(x)
        strides = grad.stride(0), x.stride(0), gate.stride(0)
        _gate_backward[grid](grad, x, gate, *strides, grad_x, grad_gate, x.shape[1], BLOCK=block)
    return grad_x, grad_gate


def _grid(x: Tensor) -> tuple[tuple[int, int], int]:
    block = min(_BLOCK, triton.next_power_of_2(x.shape[1]))
    return (x.shape[0], triton.cdiv(x.shape[1], block)), block


@triton.jit
def _gate_forward(x, x_stride, gate, gate_stride, out, channels, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    v = tl.load(x + row * x_stride + channel, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * channels + channel, (v * sigmoid(g)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_backward(
    grad, x, gate, grad_stride, x_stride, gate_stride, grad_x, grad_gate, channels, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    d = tl.load(grad + row * grad_stride + channel, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(x + row * x_stride + channel, mask=inside, other=0.0).to(tl.float32)
    s = sigmoid(tl.load(gate + row * gate_stride + channel, mask=inside, other=0.0).to(tl.float32))
    at = row * channels + channel
    tl.store(grad_x + at, (d * s).to(grad_x.dtype.element_ty), mask=inside)
    tl.store(grad_gate + at, (d * v * s * (1.0 - s)).to(grad_gate.dtype.element_ty), mask=inside)
