"""The short convolution with SiLU as Triton kernels. Import only where a GPU is: this imports Triton.

A program walks along the tokens with a few hundred channels and keeps the last w - 1 tokens in registers, so
every operand is read once; the backward pass computes the pre-activation again. Legend: b rows, t tokens,
c channels in p equal parts, w taps.
"""

# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3train.kernels.adjacent import empty_beside
from k3train.kernels.triton_math import sigmoid
from k3train.kernels.triton_partial import add_up

_CHANNELS = 512
"""Channels of a program, at most."""
_AHEAD = 8
"""Tokens that are loaded at once."""
_TILES = 8
"""Times ``_AHEAD`` tokens of one program; in the backward pass they share a partial sum of the weight's
gradient."""


def forward(xs: tuple[Tensor, ...], weight: Tensor, position: Tensor) -> Tensor:
    """p parts of x, each [b, t, c/p] with the same strides -> [p, b, t, c/p].

    weight [c, w] contiguous, position int64 [t].
    """
    (b, t, width), parts = xs[0].shape, len(xs)
    out = torch.empty(parts, b, t, width, dtype=xs[0].dtype, device=xs[0].device)
    block, warps = _block(width)
    _conv_forward[(triton.cdiv(t, _AHEAD * _TILES), parts * triton.cdiv(width, block), b)](
        xs, *xs[0].stride()[:2], weight, position, out, t, width,
        PARTS=parts, W=weight.shape[1], BC=block, AHEAD=_AHEAD, TILES=_TILES, num_warps=warps,
    )  # fmt: skip
    return out


def backward(
    grads: tuple[Tensor, ...], xs: tuple[Tensor, ...], weight: Tensor, position: Tensor
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Gradients of the parts of x, [b, t, c/p] side by side as they are, and of weight, fp32 [c, w].

    ``grads`` are p times [b, t, c/p], contiguous.
    """
    (b, t, width), parts = xs[0].shape, len(xs)
    taps = weight.shape[1]
    rows = triton.cdiv(t, _AHEAD * _TILES)
    grad_xs = empty_beside(xs)
    partial = torch.empty(b, rows, parts * width, taps, dtype=torch.float32, device=xs[0].device)
    block, warps = _block(width)
    _conv_backward[(rows, parts * triton.cdiv(width, block), b)](
        grads, xs, *xs[0].stride()[:2], weight, position,
        grad_xs, *grad_xs[0].stride()[:2], partial, t, width,
        PARTS=parts, W=taps, BC=block, AHEAD=_AHEAD, TILES=_TILES, num_warps=warps,
    )  # fmt: skip
    return grad_xs, add_up(partial.view(b * rows, -1)).view(-1, taps)


def _block(channels: int) -> tuple[int, int]:
    """Channels of a program, and its warps: four channels a thread."""
    block = min(_CHANNELS, triton.next_power_of_2(channels))
    return block, max(1, block // 128)


@triton.jit
def _taps(weight, channel, ok, W: tl.constexpr):
    """By distance: tap 0 is on the token itself."""
    taps = ()
    for j in tl.static_range(W):
        taps = taps + (tl.load(weight + channel * W + W - 1 - j, mask=ok, other=0.0),)  # noqa: RUF005
    return taps


@triton.jit
def _convolve(now, seen, taps, place, W: tl.constexpr):
    """Pre-activation of the token ``now``, whose place in its document is ``place``."""
    y = now * taps[0]
    for j in tl.static_range(1, W):
        y += tl.where(place >= j, seen[j - 1], 0.0) * taps[j]
    return y


@triton.jit
def _push(now, seen, W: tl.constexpr):
    """The W - 1 newest tokens, newest first."""
    kept = ()
    if W > 1:
        kept = kept + (now,)  # noqa: RUF005
    for j in tl.static_range(W - 2):
        kept = kept + (seen[j],)  # noqa: RUF005
    return kept


@triton.jit
def _send(d, mine, now, seen, taps, place, sums, open_, W: tl.constexpr):
    """What a token with gradient ``d`` sends to itself and its W - 1 predecessors: new sums of the weight's
    gradient, gradients that are not complete yet, newest first, and the one that is."""
    complete = d * taps[0]
    sums_now = (sums[0] + mine * now,)
    open_now = ()
    for j in tl.static_range(1, W):
        sees = place >= j
        sums_now = sums_now + (sums[j] + tl.where(sees, mine * seen[j - 1], 0.0),)  # noqa: RUF005
        open_now = open_now + (complete,)  # noqa: RUF005
        complete = open_[j - 1] + tl.where(sees, d * taps[j], 0.0)
    return sums_now, open_now, complete


@triton.jit
def _pick(pointers, part, PARTS: tl.constexpr):
    pointer = pointers[0]
    for p in tl.static_range(1, PARTS):
        pointer = tl.where(part == p, pointers[p], pointer)
    return pointer


@triton.jit
def _conv_forward(
    xs,
    row_stride,
    stride,
    weight,
    position,
    out,
    tokens,
    width,
    PARTS: tl.constexpr,
    W: tl.constexpr,
    BC: tl.constexpr,
    AHEAD: tl.constexpr,
    TILES: tl.constexpr,
):
    blocks = tl.cdiv(width, BC)
    part = tl.program_id(1) // blocks
    inner = (tl.program_id(1) % blocks) * BC + tl.arange(0, BC)
    ok = inner < width
    channel = part * width + inner
    row = tl.program_id(2).to(tl.int64)
    x = _pick(xs, part, PARTS) + row * row_stride + inner
    out += (part * tl.num_programs(2) + row) * tokens * width + inner
    taps = _taps(weight, channel, ok, W)
    first = tl.program_id(0) * (AHEAD * TILES)
    seen = ()  # the W - 1 tokens before, newest first
    for j in tl.static_range(1, W):
        token = first - j
        before = tl.load(x + token.to(tl.int64) * stride, mask=ok & (token >= 0), other=0.0)
        seen = seen + (before.to(tl.float32),)  # noqa: RUF005
    for tile in range(TILES):
        start = first + tile * AHEAD
        loaded = ()
        for i in tl.static_range(AHEAD):
            token = start + i
            row_of_x = tl.load(x + token.to(tl.int64) * stride, mask=ok & (token < tokens), other=0.0)
            loaded = loaded + (row_of_x,)  # noqa: RUF005
        for i in tl.static_range(AHEAD):
            token = start + i
            inside = token < tokens
            place = tl.load(position + token, mask=inside, other=0)
            now = loaded[i].to(tl.float32)
            y = _convolve(now, seen, taps, place, W)
            value = (y * sigmoid(y)).to(out.dtype.element_ty)
            tl.store(out + token.to(tl.int64) * width, value, mask=ok & inside)
            seen = _push(now, seen, W)


@triton.jit
def _conv_backward(
    grads,
    xs,
    row_stride,
    stride,
    weight,
    position,
    grad_xs,
    grad_row_stride,
    grad_stride,
    partial,
    tokens,
    width,
    PARTS: tl.constexpr,
    W: tl.constexpr,
    BC: tl.constexpr,
    AHEAD: tl.constexpr,
    TILES: tl.constexpr,
):
    blocks = tl.cdiv(width, BC)
    part = tl.program_id(1) // blocks
    inner = (tl.program_id(1) % blocks) * BC + tl.arange(0, BC)
    ok = inner < width
    channel = part * width + inner
    channels = PARTS * width
    row = tl.program_id(2).to(tl.int64)
    grad = _pick(grads, part, PARTS) + row * tokens * width + inner
    x = _pick(xs, part, PARTS) + row * row_stride + inner
    grad_x = _pick(grad_xs, part, PARTS) + row * grad_row_stride + inner
    taps = _taps(weight, channel, ok, W)
    first = tl.program_id(0) * (AHEAD * TILES)
    last = first + AHEAD * TILES  # later tokens only send back to this program's
    seen, sums, open_ = (), (), ()  # open_: gradients not yet complete, newest first
    for _ in tl.static_range(W):
        sums = sums + (tl.zeros([BC], tl.float32),)  # noqa: RUF005
    for j in tl.static_range(1, W):
        token = first - j
        before = tl.load(x + token.to(tl.int64) * stride, mask=ok & (token >= 0), other=0.0)
        seen = seen + (before.to(tl.float32),)  # noqa: RUF005
        open_ = open_ + (tl.zeros([BC], tl.float32),)  # noqa: RUF005
    for tile in range(TILES + (W + AHEAD - 2) // AHEAD):
        start = first + tile * AHEAD
        loaded, sent = (), ()
        for i in tl.static_range(AHEAD):
            token = start + i
            # no token beyond last + W - 1 sees this program's
            inside = ok & (token < tokens) & (token < last + W - 1)
            loaded = loaded + (tl.load(x + token.to(tl.int64) * stride, mask=inside, other=0.0),)  # noqa: RUF005
            sent = sent + (tl.load(grad + token.to(tl.int64) * width, mask=inside, other=0.0),)  # noqa: RUF005
        for i in tl.static_range(AHEAD):
            token = start + i
            # a token beyond the last has no gradient and sends nothing
            place = tl.load(position + token, mask=token < tokens, other=0)
            now = loaded[i].to(tl.float32)
            y = _convolve(now, seen, taps, place, W)
            s = sigmoid(y)
            d = sent[i].to(tl.float32) * (s + y * s * (1.0 - s))
            mine = tl.where(token < last, d, 0.0)
            sums, open_, complete = _send(d, mine, now, seen, taps, place, sums, open_, W)
            done = token - (W - 1)
            inside = ok & (done >= first) & (done < last) & (done < tokens)
            value = complete.to(grad_x.dtype.element_ty)
            tl.store(grad_x + done.to(tl.int64) * grad_stride, value, mask=inside)
            seen = _push(now, seen, W)
    # partial is [b, programs, c, w]
    at = partial + ((row * tl.num_programs(0) + tl.program_id(0)) * channels + channel) * W
    for j in tl.static_range(W):
        tl.store(at + W - 1 - j, sums[j], mask=ok)
