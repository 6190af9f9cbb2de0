"""Causal depth-wise convolution over a few tokens, then SiLU, by document (k3 report section 2.1)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from k3train.backend.derivative import once_differentiable
from k3train.kernels.packing import Packing, check_packed


def short_conv(x: Tensor, weight: Tensor, packing: Packing | None = None, cp_group: Any = None) -> Tensor:
    """As ``short_conv_parts`` with one part."""
    return short_conv_parts((x,), weight, packing, cp_group)[0]


def short_conv_parts(
    xs: tuple[Tensor, ...], weight: Tensor, packing: Packing | None = None, cp_group: Any = None
) -> tuple[Tensor, ...]:
    """SiLU(sum_j weight[:, w - 1 - j] * x[t - j]) over the tokens t - j of t's own document.

    x is ``xs`` side by side, p tensors [b, t, c / p]: this context-parallel rank's contiguous share of the
    tokens. ``weight`` [c, w], its last tap on the token itself. Without ``packing`` every row is one
    document; with it b must be 1. Computed in fp32 (fp64 for fp64 input). The result is p contiguous
    tensors like ``xs``. With a ``cp_group`` of several ranks each receives w - 1 tokens from the rank before
    it: every rank must call this, forward and backward.
    """
    reach = weight.shape[1] - 1
    sharded = cp_group is not None and cp_group.size() > 1
    tokens = xs[0].shape[1]
    if sharded and tokens < reach:
        raise ValueError(
            f"a context-parallel shard of {tokens} tokens is shorter than the {reach} tokens that the "
            "convolution looks back; lower parallel.cp or lengthen the context"
        )
    if packing is None:
        first = reach if cp_group is not None and cp_group.rank() else 0
        position = torch.arange(tokens, device=xs[0].device) + first
    else:
        check_packed(xs[0], packing)
        position = packing.position
    fused = xs[0].is_cuda and xs[0].dtype is torch.bfloat16
    if fused and not (sharded and reach):
        return _FusedShortConv.apply(weight, position, *xs)  # pyright: ignore
    x = xs[0] if len(xs) == 1 else torch.cat(xs, 2)
    halo = _HaloFromLeft.apply(x[:, tokens - reach :], cp_group) if sharded and reach else None
    if fused:
        # nothing of the halo's own output is used; its positions only must not look back
        position = torch.nn.functional.pad(position, (reach, 0))
        longer = torch.cat([halo, x], 1).chunk(len(xs), 2)  # pyright: ignore
        parts = _FusedShortConv.apply(weight, position, *longer)
        return tuple(part[:, reach:].contiguous() for part in parts)  # pyright: ignore
    out: Tensor = _ShortConv.apply(x, halo, weight, position)  # pyright: ignore
    return tuple(part.contiguous() for part in out.chunk(len(xs), 2))


class _ShortConv(torch.autograd.Function):
    """Keeps the input and recomputes the pre-activation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, halo: Tensor | None, weight: Tensor, position: Tensor) -> Tensor:
        ctx.save_for_backward(x, halo, weight, position)
        return torch.nn.functional.silu(_convolve(x, halo, weight, position)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, halo, weight, position = ctx.saved_tensors
        y = _convolve(x, halo, weight, position)
        s = torch.sigmoid(y)
        dy = grad.to(y.dtype) * (s + y * s * (1 - s))
        w, t = weight.to(y.dtype), x.shape[1]
        reach = weight.shape[1] - 1
        dx = dy * w[:, reach]
        dw = torch.zeros_like(w)
        dw[:, reach] = (dy * x).sum((0, 1))
        dhalo = None if halo is None else dx.new_zeros(halo.shape)
        for j in range(1, min(reach, t - 1 if halo is None else t) + 1):
            sent = torch.where((position >= j)[:, None], dy, 0)
            dx[:, : t - j].addcmul_(sent[:, j:], w[:, reach - j])
            dw[:, reach - j] = (sent[:, j:] * x[:, : t - j]).sum((0, 1))
            if halo is not None and dhalo is not None:
                dhalo[:, reach - j :].addcmul_(sent[:, :j], w[:, reach - j])
                dw[:, reach - j] += (sent[:, :j] * halo[:, reach - j :]).sum((0, 1))
        if dhalo is not None:
            dhalo = dhalo.to(x.dtype)
        return dx.to(x.dtype), dhalo, dw.to(weight.dtype), None


class _FusedShortConv(torch.autograd.Function):
    """One kernel in each direction, for bf16 on a GPU; keeps the input like ``_ShortConv``."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, position: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        from k3train.kernels import triton_conv

        weight = weight.contiguous()
        if any(x.stride() != xs[0].stride() or x.stride(-1) != 1 for x in xs):
            xs = tuple(x.contiguous() for x in xs)
        ctx.save_for_backward(weight, position, *xs)
        return triton_conv.forward(xs, weight, position).unbind()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from k3train.kernels import triton_conv

        weight, position, *xs = ctx.saved_tensors
        grads = tuple(grad.contiguous() for grad in grads)
        grad_xs, grad_weight = triton_conv.backward(grads, tuple(xs), weight, position)
        return grad_weight.to(weight.dtype), None, *grad_xs


def _convolve(x: Tensor, halo: Tensor | None, weight: Tensor, position: Tensor) -> Tensor:
    """Pre-activation [b, t, c]; ``halo`` [b, w - 1, c] are the tokens before ``x``."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    w, t, reach = weight.to(dtype), x.shape[1], weight.shape[1] - 1
    out = x.to(dtype) * w[:, reach]
    for j in range(1, min(reach, t if halo is not None else t - 1) + 1):
        # selection, not multiplication by zero: another document's infinity must not become NaN here
        seen = (position >= j)[:, None]
        out[:, j:].addcmul_(torch.where(seen[j:], x[:, : t - j], 0).to(dtype), w[:, reach - j])
        if halo is not None:
            out[:, :j].addcmul_(torch.where(seen[:j], halo[:, reach - j :], 0).to(dtype), w[:, reach - j])
    return out


class _HaloFromLeft(torch.autograd.Function):
    """The last tokens of the rank before, zeros on the first rank; gradients go back the way they came."""

    @staticmethod
    def forward(ctx: Any, tail: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _shift(tail, group, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _shift(grad, ctx.group, -1), None


def _shift(x: Tensor, group: Any, step: int) -> Tensor:
    """Send ``x`` ``step`` ranks up, return what arrives; zeros where nothing does."""
    rank, size = group.rank(), group.size()
    x, received = x.contiguous(), torch.zeros_like(x, memory_format=torch.contiguous_format)
    operations = []
    if 0 <= rank + step < size:
        operations.append(dist.P2POp(dist.isend, x, group=group, group_peer=rank + step))
    if 0 <= rank - step < size:
        operations.append(dist.P2POp(dist.irecv, received, group=group, group_peer=rank - step))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received
