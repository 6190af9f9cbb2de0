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
from k3train.kernels.triton_math import exp2, reciprocal

_BLOCK, _ELEMENTS = 512, 1024
"""Most channels and, times rows, elements that a program works on at once."""


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
    """Channels and rows; 512 channels only where none of them are idle."""
    block = _BLOCK if channels % _BLOCK == 0 else min(_BLOCK // 2, triton.next_power_of_2(channels))
    return block, _ELEMENTS // block


# Instructions, not memory, would bound these kernels if each function were computed on its own. tanh(|x|) and
# sigmoid(x) are n / d with e = 2^(-k |x|) and d = 1 + e in [1, 2]: forward, one reciprocal serves all three;
# 1 - tanh^2 = 4 e / d^2 keeps its digits where tanh saturates. Signs are put in at the end.

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tanh(x, inverse_cap):
    """n, d and e of tanh(|x| / cap) = n / d."""
    size = tl.abs(x) * inverse_cap
    e = exp2(size * (-2.0 * _LOG2_E))
    d = 1.0 + e
    # 1 - e has no digits left for small x, where tanh(x) = x to 5e-6
    return tl.where(size < 0.00390625, size * d, 1.0 - e), d, e


@triton.jit
def _sigmoid(x):
    """n, d and e of sigmoid(x) = n / d."""
    e = exp2(tl.abs(x) * (-_LOG2_E))
    return tl.where(x < 0, e, 1.0), 1.0 + e, e


@triton.jit
def _signed(x, like):
    """x with its sign turned where ``like`` is negative."""
    sign = like.to(tl.int32, bitcast=True) & -2147483648
    return (x.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)


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
    scale = gate_cap * up_cap
    if WEIGHTED:
        scale *= tl.load(weight + row, mask=row < n, other=0.0).to(tl.float32)
    n_g, d_g, _ = _tanh(g, 1.0 / gate_cap)
    n_s, d_s, _ = _sigmoid(g)
    n_u, d_u, _ = _tanh(u, 1.0 / up_cap)
    y = _signed(_signed(n_g * n_s * n_u, g), u) * reciprocal(d_g * d_s * d_u) * scale
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
        n_g, d_g, e_g = _tanh(g, 1.0 / gate_cap)
        n_s, d_s, e_s = _sigmoid(g)
        n_u, d_u, e_u = _tanh(u, 1.0 / up_cap)
        inverse_g, inverse_s, inverse_u = reciprocal(d_g), reciprocal(d_s), reciprocal(d_u)
        tanh_g, tanh_u = _signed(n_g * inverse_g, g), _signed(n_u * inverse_u, u)
        sigmoid_g, rest = n_s * inverse_s, tl.where(g < 0, 1.0, e_s) * inverse_s
        slope_g = e_g * inverse_g * inverse_g + tanh_g * rest * (0.25 * gate_cap)
        dts = d * tanh_g * sigmoid_g
        total += dts * tanh_u
        grad_g = (d * tanh_u) * sigmoid_g * slope_g * (4.0 * up_cap * scale)
        grad_u = dts * (e_u * inverse_u * inverse_u) * (4.0 * gate_cap * scale)
        at = row * grad_stride + channel
        tl.store(grad_gate + at, grad_g.to(grad_gate.dtype.element_ty), mask=inside)
        tl.store(grad_up + at, grad_u.to(grad_up.dtype.element_ty), mask=inside)
    if WEIGHTED:
        sums = (gate_cap * up_cap * tl.sum(total, 1))[:, None].to(grad_weight.dtype.element_ty)
        tl.store(grad_weight + row, sums, mask=row < n)
