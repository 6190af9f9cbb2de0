"""The mix over depth as Triton kernels. Import only where a GPU is: this imports Triton.

One program holds all channels of a token, so every source is read once in each direction; the next one is
loaded while sums over the channels of one are taken. Legend: n tokens, w sources, c channels.
"""

# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WARPS = 2112
"""Warps of the backward pass, 16 on each of 132 processors; each program leaves a partial sum."""


def forward(sources: list[Tensor], direction: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mixed [n, c] and, for ``backward``, fp32 [n] log-sums; sources [n, c] with unit channel stride."""
    n, c = sources[0].shape
    out = torch.empty(n, c, dtype=sources[0].dtype, device=sources[0].device)
    logsum = torch.empty(n, dtype=torch.float32, device=out.device)
    strides = tuple(source.stride(0) for source in sources)
    block = triton.next_power_of_2(c)
    _mix_forward[(n,)](
        tuple(sources),
        strides,
        direction,
        out,
        logsum,
        c,
        eps,
        W=len(sources),
        BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
        maxnreg=64,  # more make it slower: fewer tokens at a time
    )
    return out, logsum


def backward(
    grad: Tensor, sources: list[Tensor], direction: Tensor, out: Tensor, logsum: Tensor, eps: float
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of the direction, fp32 [c], and of each source, [n, c]; ``grad`` [n, c].

    ``out`` and ``logsum`` are the forward pass' results. ``grad . out`` stands for the sum of the weighted
    ``grad . source`` (as in flash attention), so that sources are read once.
    """
    n, c = sources[0].shape
    block = triton.next_power_of_2(c)
    warps = max(1, min(16, block // 1024))
    programs = min(n, _WARPS // warps)
    partial = torch.empty(programs, c, dtype=torch.float32, device=grad.device)
    grads = [torch.empty(n, c, dtype=source.dtype, device=source.device) for source in sources]
    strides = tuple(source.stride(0) for source in sources)
    _mix_backward[(programs,)](
        grad,
        grad.stride(0),
        tuple(sources),
        strides,
        direction,
        out,
        logsum,
        tuple(grads),
        partial,
        n,
        c,
        eps,
        W=len(sources),
        BLOCK=block,
        num_warps=warps,
    )
    return partial.sum(0), grads


@triton.jit
def _add_two(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add_three(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _load(sources, strides, i: tl.constexpr, row, channel, inside):
    return tl.load(sources[i] + row * strides[i] + channel, mask=inside, other=0.0)


@triton.jit
def _mix_forward(
    sources, strides, direction, out, logsum, channels, eps, W: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < channels
    u = tl.load(direction + channel, mask=inside, other=0.0)
    top = -float("inf")
    total = 0.0
    mixed = tl.zeros([BLOCK], tl.float32)
    coming = _load(sources, strides, 0, row, channel, inside)
    for i in tl.static_range(W):
        v = coming.to(tl.float32)
        if i + 1 < W:
            coming = _load(sources, strides, i + 1, row, channel, inside)
        dot, square = tl.reduce((v * u, v * v), 0, _add_two)
        logit = dot * tl.rsqrt(square / channels + eps)
        new_top = tl.maximum(top, logit)
        fade = tl.exp(top - new_top)
        weight = tl.exp(logit - new_top)
        total = total * fade + weight
        mixed = mixed * fade + weight * v
        top = new_top
    tl.store(out + row * channels + channel, (mixed / total).to(out.dtype.element_ty), mask=inside)
    tl.store(logsum + row, top + tl.log(total))


@triton.jit
def _mix_backward(
    grad,
    grad_stride,
    sources,
    strides,
    direction,
    out,
    logsum,
    grads,
    partial,
    n,
    channels,
    eps,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    channel = tl.arange(0, BLOCK)
    inside = channel < channels
    u = tl.load(direction + channel, mask=inside, other=0.0)
    grad_u = tl.zeros([BLOCK], tl.float32)
    at = tl.program_id(0).to(tl.int64)
    while at < n:
        g = tl.load(grad + at * grad_stride + channel, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(out + at * channels + channel, mask=inside, other=0.0).to(tl.float32)
        coming = _load(sources, strides, 0, at, channel, inside)
        lse = tl.load(logsum + at)
        # sum_i weight_i (grad . source_i), known before any source is read
        inner = tl.sum(g * y, 0)
        for i in tl.static_range(W):
            v = coming.to(tl.float32)
            if i + 1 < W:
                coming = _load(sources, strides, i + 1, at, channel, inside)
            # one reduction of three sums: a third of the barriers
            dot, square, along_grad = tl.reduce((v * u, v * v, v * g), 0, _add_three)
            scale = tl.rsqrt(square / channels + eps)
            weight = tl.exp(dot * scale - lse)
            along = weight * (along_grad - inner) * scale
            across = along * dot * scale * scale / channels
            grad_u += along * v
            d = weight * g + along * u - across * v
            tl.store(grads[i] + at * channels + channel, d.to(grads[i].dtype.element_ty), mask=inside)
        at += tl.num_programs(0)
    tl.store(partial + tl.program_id(0) * channels + channel, grad_u, mask=inside)
