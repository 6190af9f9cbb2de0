"""SiTU-GLU as Triton kernels, for bf16 on a GPU. Import only where a GPU is: this imports Triton."""

# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3train.kernels.adjacent import empty_beside
from k3train.kernels.rms_norm import as_rows

_BLOCK, _ELEMENTS = 256, 1024
"""Channels and, times rows, elements that a program works on at once."""


def forward(gate: Tensor, up: Tensor, gate_cap: float, up_cap: float, weight: Tensor | None) -> Tensor:
    """As ``situ_glu``; rows of gate and up may be longer than their channels."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gate, up = as_rows(gate), as_rows(up)
    n, channels = gate.shape
    if n:
        block, rows = _tile(channels)
        grid = (triton.cdiv(n, rows), triton.cdiv(channels, block))
        _situ_forward[grid](
            gate, gate.stride(0), up, up.stride(0), gate if weight is None else weight, out,
            n, channels, gate_cap, up_cap, WEIGHTED=weight is not None, ROWS=rows, BLOCK=block,
        )  # fmt: skip
    return out


def backward(
    grad: Tensor, gate: Tensor, up: Tensor, gate_cap: float, up_cap: float, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of gate and up, side by side as they are, and of weight."""
    grad, shape = grad.contiguous(), gate.shape
    gate, up = as_rows(gate), as_rows(up)
    grad_gate, grad_up = empty_beside((gate, up))
    grad_weight = None if weight is None else torch.empty_like(weight)
    n, channels = gate.shape
    if n:
        block, rows = _tile(channels)
        _situ_backward[(triton.cdiv(n, rows),)](
            grad, gate, gate.stride(0), up, up.stride(0), gate if weight is None else weight,
            grad_gate, grad_up, grad_gate.stride(0), gate if grad_weight is None else grad_weight,
            n, gate_cap, up_cap, CHANNELS=channels, WEIGHTED=weight is not None, ROWS=rows, BLOCK=block,
        )  # fmt: skip
    return grad_gate.view(shape), grad_up.view(shape), grad_weight


def _tile(channels: int) -> tuple[int, int]:
    block = min(_BLOCK, triton.next_power_of_2(channels))
    return block, _ELEMENTS // block


@triton.jit
def _tanh(x):
    # By exp alone, small x would lose its digits to the 1; the polynomial is exact to 4e-7 below 1/4.
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    far = 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
    return tl.where(square < 0.0625, near, far)


@triton.jit
def _situ_forward(
    gate,
    gate_stride,
    up,
    up_stride,
    weight,
    out,
    n,
    channels,
    gate_cap,
    up_cap,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < n) & (channel < channels)
    g = tl.load(gate + row * gate_stride + channel, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + channel, mask=inside, other=0.0).to(tl.float32)
    y = gate_cap * _tanh(g / gate_cap) * tl.sigmoid(g) * (up_cap * _tanh(u / up_cap))
    if WEIGHTED:
        y *= tl.load(weight + row, mask=row < n, other=0.0).to(tl.float32)
    tl.store(out + row * channels + channel, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _situ_backward(
    grad,
    gate,
    gate_stride,
    up,
    up_stride,
    weight,
    grad_gate,
    grad_up,
    grad_stride,
    grad_weight,
    n,
    gate_cap,
    up_cap,
    CHANNELS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program takes whole rows, so that the weight's gradient is a sum in a fixed order.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    scale = 1.0
    if WEIGHTED:
        scale = tl.load(weight + row, mask=row < n, other=0.0).to(tl.float32)
    for start in range(0, CHANNELS, BLOCK):
        channel = start + tl.arange(0, BLOCK)[None, :]
        inside = (row < n) & (channel < CHANNELS)
        d = tl.load(grad + row * CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gate + row * gate_stride + channel, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + row * up_stride + channel, mask=inside, other=0.0).to(tl.float32)
        tanh_g = _tanh(g / gate_cap)
        sigmoid_g = tl.sigmoid(g)
        tanh_u = _tanh(u / up_cap)
        a = gate_cap * tanh_g * sigmoid_g
        b = up_cap * tanh_u
        total += d * a * b
        d *= scale
        slope = (1.0 - tanh_g * tanh_g) * sigmoid_g + a * (1.0 - sigmoid_g)
        at = row * grad_stride + channel
        tl.store(grad_gate + at, (d * b * slope).to(grad_gate.dtype.element_ty), mask=inside)
        tl.store(grad_up + at, (d * a * (1.0 - tanh_u * tanh_u)).to(grad_up.dtype.element_ty), mask=inside)
    if WEIGHTED:
        sums = tl.sum(total, 1)[:, None].to(grad_weight.dtype.element_ty)
        tl.store(grad_weight + row, sums, mask=row < n)
