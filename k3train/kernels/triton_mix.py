"""The mix over depth as Triton kernels. Import only where a GPU is: this imports Triton.

One program holds all channels of a token, so every source is read once in each direction. What bounds them
is bytes under way: an H200's memory has 32 KB a microsecond for each processor, and one source of a token is
14 KB. So a program takes token after token, and the next sources come through shared memory while the sums of
one are taken; registers cannot hold that much. Legend: n tokens, w sources, c channels.
"""

# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3train.kernels.triton_partial import add_up


def forward(sources: list[Tensor], direction: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mixed [n, c] and, for ``backward``, fp32 [n] log-sums; sources [n, c] with unit channel stride."""
    n, c = sources[0].shape
    out = torch.empty(n, c, dtype=sources[0].dtype, device=sources[0].device)
    logsum = torch.empty(n, dtype=torch.float32, device=out.device)
    block, warps = _block(c)
    # 16 warps a processor have 128 registers a thread; 96 hold its channels of direction, sum and source
    _mix_forward[(_programs(out, 16 // warps),)](
        tuple(sources),
        tuple(source.stride(0) for source in sources),
        direction,
        out,
        logsum,
        n,
        c,
        eps,
        W=len(sources),
        BLOCK=block,
        # each but the one in work is 32 KB under way in a processor, 64 KB in fp32
        STAGES=6 if warps < 8 and out.element_size() == 2 else 4,
        num_warps=warps,
        maxnreg=128,
    )
    return out, logsum


def backward(
    grad: Tensor, sources: list[Tensor], direction: Tensor, out: Tensor, logsum: Tensor, eps: float
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of the direction, fp32 [c], and of each source, [n, c]; ``grad`` [n, c].

    ``out`` and ``logsum`` are the forward pass' results. ``grad . out`` stands for the sum of the weighted
    ``grad . source`` (as in flash attention), so that sources are read once. Each program leaves a partial
    sum of the direction's gradient; they are added in a fixed order.
    """
    n, c = out.shape
    block, warps = _block(c)
    grads = [torch.empty(n, c, dtype=source.dtype, device=source.device) for source in sources]
    each = programs_with_slots([grad, out, *sources], _device(out))
    if each:
        from k3train.kernels.triton_mix_slots import mix_backward
    else:
        mix_backward, each = _mix_backward, 16 // warps
    partial = torch.empty(_programs(out, each), c, dtype=torch.float32, device=out.device)
    mix_backward[(len(partial),)](
        (grad, out, *sources),
        (grad.stride(0), c, *(source.stride(0) for source in sources)),
        direction,
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
    return add_up(partial), grads


def programs_with_slots(tensors: list[Tensor], device: Any) -> int:
    """Programs a processor of ``triton_mix_slots``, which has a slot of shared memory for each of ``tensors``
    [n, c], the backward pass' gradient, result and sources; 0 if it cannot take them on that device.

    It reads two-byte numbers, 16 bytes at a time; Triton knows of a stride only whether 16 divides it.
    """
    aligned = all(t.data_ptr() % 16 == 0 and t.stride(0) % 16 == 0 and t.element_size() == 2 for t in tensors)
    c = tensors[0].shape[1]
    if not (aligned and c % 16 == 0 and c <= 8192):
        return 0
    if device is None or torch.version.hip or device.major < 8 or find_spec("triton.experimental") is None:
        return 0
    block, warps = _block(c)
    # a program takes 1 KB for the system and less than 1 KB for sums as well
    fitting = device.shared_memory_per_multiprocessor // (2 * block * len(tensors) + 2048)
    # 8 warps a processor have 255 registers a thread
    return min(8 // warps, fitting)


def _block(channels: int) -> tuple[int, int]:
    """Channels of a program and its warps: 32 channels a thread, where a row has as many."""
    block = max(256, triton.next_power_of_2(channels))
    return block, max(1, block // 1024)


def _device(rows: Tensor) -> Any:
    """Properties of the GPU, or None where Triton's interpreter runs."""
    return _properties(rows.device) if rows.is_cuda else None


@cache
def _properties(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device)


def _programs(rows: Tensor, each: int) -> int:
    """Programs that take the tokens of ``rows`` [n, c] one after another, ``each`` a processor."""
    device = _device(rows)
    return min(len(rows), each * device.multi_processor_count if device else 2)


@triton.jit
def _add_two(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def add_three(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _row(sources, strides, i, at, W: tl.constexpr):
    """Where row ``at`` of the ``i``-th source starts."""
    start = sources[0]
    stride = strides[0].to(tl.int64)
    for k in tl.static_range(1, W):
        start = tl.where(i == k, sources[k], start)
        stride = tl.where(i == k, strides[k].to(tl.int64), stride)
    return start + at * stride


@triton.jit
def _mix_forward(
    sources,
    strides,
    direction,
    out,
    logsum,
    n,
    channels,
    eps,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One loop over all sources of all tokens of a program, so that the next token's come ahead as well."""
    channel = tl.arange(0, BLOCK)
    inside = channel < channels
    u = tl.load(direction + channel, mask=inside, other=0.0)
    first = tl.program_id(0)
    step = tl.num_programs(0)
    top = -float("inf")
    total = 0.0
    mixed = tl.zeros([BLOCK], tl.float32)
    i = 0
    at = first.to(tl.int64)
    for j in tl.range(0, (n - first + step - 1) // step * W, num_stages=STAGES):
        # j is the source that is loaded; i and at, of the one summed, are counted apart from it, or they
        # would be kept for every source under way
        row = _row(sources, strides, j % W, (first + j // W * step).to(tl.int64), W)
        v = tl.load(row + channel, mask=inside, other=0.0).to(tl.float32)
        dot, square = tl.reduce((v * u, v * v), 0, _add_two)
        logit = dot * tl.rsqrt(square / channels + eps)
        new_top = tl.maximum(top, logit)
        fade = tl.exp(top - new_top)
        weight = tl.exp(logit - new_top)
        total = total * fade + weight
        mixed = mixed * fade + weight * v
        top = new_top
        i += 1
        if i == W:
            mixed *= 1.0 / total
            tl.store(out + at * channels + channel, mixed.to(out.dtype.element_ty), mask=inside)
            tl.store(logsum + at, top + tl.log(total))
            top = -float("inf")
            total = 0.0
            mixed = tl.zeros([BLOCK], tl.float32)
            i = 0
            at += step


@triton.jit
def source_gradient(v, u, g, dot, square, along_grad, inner, lse, channels, eps):
    """Gradient [BLOCK] of source ``v``, and what the direction's gradient has of it per ``v``.

    u [BLOCK] is the direction, g the result's gradient; dot, square, along_grad are v . u, v . v, v . g.
    """
    scale = tl.rsqrt(square / channels + eps)
    weight = tl.exp(dot * scale - lse)
    along = weight * (along_grad - inner) * scale
    across = along * dot * scale * scale / channels
    return weight * g + along * u - across * v, along


@triton.jit
def _load(tensors, strides, i: tl.constexpr, row, channel, inside):
    return tl.load(tensors[i] + row * strides[i] + channel, mask=inside, other=0.0)


@triton.jit
def _mix_backward(
    tensors,
    strides,
    direction,
    logsum,
    grads,
    partial,
    n,
    channels,
    eps,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Where ``triton_mix_slots`` cannot: the next source is loaded into registers."""
    channel = tl.arange(0, BLOCK)
    inside = channel < channels
    u = tl.load(direction + channel, mask=inside, other=0.0)
    grad_u = tl.zeros([BLOCK], tl.float32)
    at = tl.program_id(0).to(tl.int64)
    while at < n:
        g = _load(tensors, strides, 0, at, channel, inside).to(tl.float32)
        y = _load(tensors, strides, 1, at, channel, inside).to(tl.float32)
        coming = _load(tensors, strides, 2, at, channel, inside)
        lse = tl.load(logsum + at)
        # sum_i weight_i (grad . source_i), known before any source is read
        inner = tl.sum(g * y, 0)
        for i in tl.static_range(W):
            v = coming.to(tl.float32)
            if i + 1 < W:
                coming = _load(tensors, strides, i + 3, at, channel, inside)
            # one reduction of three sums: a third of the barriers
            dot, square, along_grad = tl.reduce((v * u, v * v, v * g), 0, add_three)
            d, along = source_gradient(v, u, g, dot, square, along_grad, inner, lse, channels, eps)
            grad_u += along * v
            tl.store(grads[i] + at * channels + channel, d.to(grads[i].dtype.element_ty), mask=inside)
        at += tl.num_programs(0)
    tl.store(partial + tl.program_id(0) * channels + channel, grad_u, mask=inside)
