"""Differentiable collectives that layers use besides megatron-core's own.

Every rank of the group must call each of them; the first two with equal shapes. A group of one rank costs
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from k3train.backend.derivative import once_differentiable


def all_gather(x: Tensor, group: Any) -> Tensor:
    """Concatenate every rank's ``x`` along dim 0, in rank order.

    [n, ...] -> [n * ranks, ...]. The backward pass sums over ranks and returns this rank's part, as is right
    when every rank uses the gathered tensor for different work.
    """
    return x if group.size() == 1 else _AllGather.apply(x, group)


def all_to_all(x: Tensor, group: Any, *, split_dim: int, concat_dim: int) -> Tensor:
    """Give rank r the r-th part of ``x`` along ``split_dim``; join what arrives along ``concat_dim``.

    The global tensor stays the same and changes from being sharded over ``concat_dim`` to being sharded over
    ``split_dim``; size ``split_dim`` must be divisible by the number of ranks.
    """
    return x if group.size() == 1 else _AllToAll.apply(x, group, split_dim, concat_dim)


def exchange_rows(x: Tensor, send: Sequence[int], receive: Sequence[int], group: Any) -> Tensor:
    """Send rank r the next ``send[r]`` rows of ``x``; return ``receive[r]`` rows from each rank r, in order.

    [sum of send, ...] -> [sum of receive, ...]; trailing axes are equal on all ranks.
    """
    return x if group.size() == 1 else _ExchangeRows.apply(x, list(send), list(receive), group)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        out = grad.new_empty(grad.shape[0] // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Any, split_dim: int, concat_dim: int) -> Tensor:
        ctx.group, ctx.dims = group, (split_dim, concat_dim)
        return _exchange(x, group, split_dim, concat_dim)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        split_dim, concat_dim = ctx.dims
        return _exchange(grad, ctx.group, concat_dim, split_dim), None, None, None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:
        ctx.splits, ctx.group = (send, receive), group
        out = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        send, receive = ctx.splits
        out = grad.new_empty(sum(send), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), send, receive, group=ctx.group)
        return out, None, None, None


def _exchange(x: Tensor, group: Any, split_dim: int, concat_dim: int) -> Tensor:
    send = torch.stack(x.chunk(group.size(), split_dim))  # [ranks, ...]: contiguous parts in rank order
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=group)
    return torch.cat(received.unbind(), concat_dim)
