"""SiTU-GLU as Triton kernels, for bf16 on a GPU. Import only where a GPU is: this imports Triton."""

# pyright: reportMissingImports=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def forward(gate: Tensor, up: Tensor, gate_cap: float, up_cap: float, weight: Tensor | None) -> Tensor:
    """As ``situ_glu``; [..., channels] contiguous."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    channels = gate.shape[-1]
    rows = gate.numel() // channels
    if rows:
        grid = (rows, triton.cdiv(channels, _BLOCK))
        weights = gate if weight is None else weight
        _situ_forward[grid](
            gate, up, weights, out, channels, gate_cap, up_cap, WEIGHTED=weight is not None, BLOCK=_BLOCK
        )
    return out


def backward(
    grad: Tensor, gate: Tensor, up: Tensor, gate_cap: float, up_cap: float, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of gate, up and weight."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    grad_weight = None if weight is None else torch.empty_like(weight)
    channels = gate.shape[-1]
    rows = gate.numel() // channels
    if rows:
        _situ_backward[(rows,)](
            grad,
            gate,
            up,
            gate if weight is None else weight,
            grad_gate,
            grad_up,
            gate if grad_weight is None else grad_weight,
            gate_cap,
            up_cap,
            CHANNELS=channels,
            WEIGHTED=weight is not None,
            BLOCK=_BLOCK,
        )
    return grad_gate, grad_up, grad_weight


@triton.jit
def _tanh(x):
    # By exp alone, small x would lose its digits to the 1; the polynomial is exact to 4e-7 below 1/4.
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    far = 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
    return tl.where(square < 0.0625, near, far)


@triton.jit
def _situ_forward(
    gate, up, weight, out, channels, gate_cap, up_cap, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    at = row * channels + channel
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    y = gate_cap * _tanh(g / gate_cap) * tl.sigmoid(g) * (up_cap * _tanh(u / up_cap))
    if WEIGHTED:
        y *= tl.load(weight + row).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _situ_backward(
    grad,
    gate,
    up,
    weight,
    grad_gate,
    grad_up,
    grad_weight,
    gate_cap,
    up_cap,
    CHANNELS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program takes a whole row, so that the weight's gradient is a sum in a fixed order.
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    scale = 1.0
    if WEIGHTED:
        scale = tl.load(weight + row).to(tl.float32)
    for start in range(0, CHANNELS, BLOCK):
        channel = start + tl.arange(0, BLOCK)
        inside = channel < CHANNELS
        at = row * CHANNELS + channel
        d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
        tanh_g = _tanh(g / gate_cap)
        sigmoid_g = tl.sigmoid(g)
        tanh_u = _tanh(u / up_cap)
        a = gate_cap * tanh_g * sigmoid_g
        b = up_cap * tanh_u
        total += d * a * b
        d *= scale
        slope = (1.0 - tanh_g * tanh_g) * sigmoid_g + a * (1.0 - sigmoid_g)
        tl.store(grad_gate + at, (d * b * slope).to(grad_gate.dtype.element_ty), mask=inside)
        tl.store(grad_up + at, (d * a * (1.0 - tanh_u * tanh_u)).to(grad_up.dtype.element_ty), mask=inside)
    if WEIGHTED:
        tl.store(grad_weight + row, tl.sum(total, 0).to(grad_weight.dtype.element_ty))
