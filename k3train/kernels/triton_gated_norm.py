"""The gated RMSNorm of KDA heads as Triton kernels. Import only where a GPU is: this imports Triton.

Legend: n rows (tokens times heads), d channels, a power of two.
"""

# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3train.kernels.triton_math import sigmoid
from k3train.kernels.triton_partial import add_up

_ELEMENTS = 4096
"""Elements of a tile of whole rows."""
_TILES = 8
"""Tiles, one after another, that share a partial sum of the weight's gradient."""


def forward(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """x [n, d] contiguous, gate [n / heads, heads * d] with unit stride, weight fp32 [d] -> [n, d]."""
    n, d = x.shape
    out = torch.empty_like(x)
    rows = max(1, _ELEMENTS // d)
    _gated_norm_forward[(triton.cdiv(n, rows),)](
        x, weight, gate, gate.stride(0), out, n, eps, D=d, HEADS=gate.shape[1] // d, ROWS=rows
    )
    return out


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, gate: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x [n, d], of weight, fp32 [d], and of gate, contiguous."""
    n, d = x.shape
    rows = max(1, _ELEMENTS // d)
    programs = triton.cdiv(n, rows * _TILES)
    grad_x = torch.empty_like(x)
    grad_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    partial = torch.empty(programs, d, dtype=torch.float32, device=x.device)
    _gated_norm_backward[(programs,)](
        grad, x, weight, gate, gate.stride(0), grad_x, grad_gate, partial, n, eps,
        D=d, HEADS=gate.shape[1] // d, ROWS=rows, TILES=_TILES,
    )  # fmt: skip
    return grad_x, add_up(partial), grad_gate


@triton.jit
def _gated_norm_forward(
    x, weight, gate, gate_stride, out, n, eps, D: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, D)
    at = row[:, None] * D + channel[None, :]
    inside = (row < n)[:, None]
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    gate_at = (row // HEADS * gate_stride + row % HEADS * D)[:, None] + channel[None, :]
    g = tl.load(gate + gate_at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + channel)[None, :]
    rate = tl.rsqrt(tl.sum(v * v, 1) / D + eps)[:, None]
    tl.store(out + at, (v * rate * w * sigmoid(g)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_norm_backward(
    grad,
    x,
    weight,
    gate,
    gate_stride,
    grad_x,
    grad_gate,
    partial,
    n,
    eps,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    channel = tl.arange(0, D)
    w = tl.load(weight + channel)[None, :]
    grad_w = tl.zeros([D], tl.float32)
    for tile in range(TILES):
        row = (tl.program_id(0).to(tl.int64) * TILES + tile) * ROWS + tl.arange(0, ROWS)
        at = row[:, None] * D + channel[None, :]
        inside = (row < n)[:, None]
        d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        gate_at = (row // HEADS * gate_stride + row % HEADS * D)[:, None] + channel[None, :]
        opening = sigmoid(tl.load(gate + gate_at, mask=inside, other=0.0).to(tl.float32))
        rate = tl.rsqrt(tl.sum(v * v, 1) / D + eps)[:, None]
        unit = v * rate
        along = d * opening
        product = along * unit
        grad_w += tl.sum(product, 0)
        product *= w
        mean = (tl.sum(product, 1) / D)[:, None]
        dx = (along * w - unit * mean) * rate
        tl.store(grad_x + at, dx.to(grad_x.dtype.element_ty), mask=inside)
        tl.store(grad_gate + at, (product * (1.0 - opening)).to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(partial + tl.program_id(0) * D + channel, grad_w)
