"""The short convolution with SiLU as Triton kernels. Import only where a GPU is: this imports Triton.

The backward pass computes the pre-activation again, for every tap, and writes nothing of the tokens' size but
the gradient. Legend: b rows, t tokens, c channels, w taps.
"""

# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS, _CHANNELS = 16, 64
"""Tile of one program."""
_TILES = 16
"""Tiles, one after another along the tokens, that share a partial sum of the weight's gradient."""


def forward(x: Tensor, weight: Tensor, position: Tensor) -> Tensor:
    """x [b, t, c] with unit channel stride, weight [c, w] contiguous, position int64 [t] -> [b, t, c]."""
    b, t, c = x.shape
    out = torch.empty(b, t, c, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(t, _TOKENS), triton.cdiv(c, _CHANNELS), b)
    _conv_forward[grid](
        x, *x.stride()[:2], weight, position, out, t, c, W=weight.shape[1], BT=_TOKENS, BC=_CHANNELS
    )
    return out


def backward(grad: Tensor, x: Tensor, weight: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x, [b, t, c], and of weight, fp32 [c, w]; ``grad`` has unit channel stride."""
    b, t, c = x.shape
    taps = weight.shape[1]
    rows = triton.cdiv(t, _TOKENS * _TILES)
    grad_x = torch.empty(b, t, c, dtype=x.dtype, device=x.device)
    partial = torch.empty(b, rows, taps, c, dtype=torch.float32, device=x.device)
    _conv_backward[(rows, triton.cdiv(c, _CHANNELS), b)](
        grad, *grad.stride()[:2], x, *x.stride()[:2], weight, position, grad_x, partial, t, c,
        W=taps, PADDED=triton.next_power_of_2(taps), BT=_TOKENS, BC=_CHANNELS, TILES=_TILES, num_warps=8,
    )  # fmt: skip
    return grad_x, partial.sum((0, 1)).flip(0).T.contiguous()


@triton.jit
def _load_back(x, stride, position, token, channel, tokens, channels, j: tl.constexpr):
    """x at j tokens before, 0 where that is another document's; ``token`` may lie outside."""
    inside = (token >= j) & (token < tokens)
    seen = tl.load(position + token, mask=inside, other=-1) >= j
    at = (token - j).to(tl.int64)[:, None] * stride + channel[None, :]
    return tl.load(x + at, mask=seen[:, None] & (channel < channels)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _convolve(x, stride, weight, position, token, channel, tokens, channels, W: tl.constexpr):
    total = _load_back(x, stride, position, token, channel, tokens, channels, 0)
    total *= tl.load(weight + channel * W + W - 1, mask=channel < channels, other=0.0)[None, :]
    for j in tl.static_range(1, W):
        tap = tl.load(weight + channel * W + W - 1 - j, mask=channel < channels, other=0.0)
        total += _load_back(x, stride, position, token, channel, tokens, channels, j) * tap[None, :]
    return total


@triton.jit
def _conv_forward(
    x,
    row_stride,
    stride,
    weight,
    position,
    out,
    tokens,
    channels,
    W: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    row = tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    y = _convolve(x + row * row_stride, stride, weight, position, token, channel, tokens, channels, W)
    at = (row * tokens + token)[:, None] * channels + channel[None, :]
    inside = (token < tokens)[:, None] & (channel < channels)[None, :]
    tl.store(out + at, (y * tl.sigmoid(y)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _conv_backward(
    grad,
    grad_row_stride,
    grad_stride,
    x,
    row_stride,
    stride,
    weight,
    position,
    grad_x,
    partial,
    tokens,
    channels,
    W: tl.constexpr,
    PADDED: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(2).to(tl.int64)
    x += row * row_stride
    grad += row * grad_row_stride
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    ok = channel < channels
    tap_index = tl.arange(0, PADDED)
    sums = tl.zeros([PADDED, BC], tl.float32)
    for tile in range(TILES):
        token = (tl.program_id(0) * TILES + tile) * BT + tl.arange(0, BT)
        dx = tl.zeros([BT, BC], tl.float32)
        for j in tl.static_range(W):
            # what the token j later, if it is of the same document, sends back
            later = token + j
            inside = later < tokens
            y = _convolve(x, stride, weight, position, later, channel, tokens, channels, W)
            s = tl.sigmoid(y)
            at = later.to(tl.int64)[:, None] * grad_stride + channel[None, :]
            dy = tl.load(grad + at, mask=inside[:, None] & ok[None, :], other=0.0).to(tl.float32)
            dy *= s + y * s * (1.0 - s)
            sees = tl.load(position + later, mask=inside, other=-1) >= j
            tap = tl.load(weight + channel * W + W - 1 - j, mask=ok, other=0.0)
            dx += tl.where(sees[:, None], dy * tap[None, :], 0.0)
            if j == 0:
                for i in tl.static_range(W):
                    sent = tl.sum(
                        dy * _load_back(x, stride, position, token, channel, tokens, channels, i), 0
                    )
                    sums += tl.where((tap_index == i)[:, None], sent[None, :], 0.0)
        at = (row * tokens + token)[:, None] * channels + channel[None, :]
        tl.store(grad_x + at, dx.to(grad_x.dtype.element_ty), mask=(token < tokens)[:, None] & ok[None, :])
    # partial is [b, programs, w, c], by distance
    program = row * tl.num_programs(0) + tl.program_id(0)
    at = (program * W + tap_index)[:, None] * channels + channel[None, :]
    tl.store(partial + at, sums, mask=(tap_index < W)[:, None] & ok[None, :])
