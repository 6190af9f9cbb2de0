"""Rows sorted by expert: out to the experts and back to the tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from k3train.backend.derivative import once_differentiable


class SortedRoutes(NamedTuple):
    """A stable sort of the n*k routes of n tokens by expert."""

    source: Tensor
    """int64 [n*k]: route (token * k + choice) of each sorted row."""
    position: Tensor
    """int64 [n*k]: sorted row of each route."""
    counts: Tensor
    """int64 [experts]: routes of each."""
    top_k: int


def sort_routes(experts: Tensor, num_experts: int) -> SortedRoutes:
    """``experts`` int64 [n, k], below ``num_experts``."""
    flat = experts.reshape(-1)
    if num_experts <= torch.iinfo(torch.int16).max:
        flat = flat.to(torch.int16)  # a radix sort takes a pass for every byte
    source = flat.argsort(stable=True)
    if source.is_cuda:
        from k3train.kernels.triton_permute import invert

        return SortedRoutes(source, *invert(source, flat, num_experts), experts.shape[1])
    position = torch.empty_like(source)
    position.scatter_(0, source, torch.arange(source.numel(), device=source.device))
    counts = torch.bincount(flat, minlength=num_experts)
    return SortedRoutes(source, position, counts, experts.shape[1])


def permute(tokens: Tensor, order: SortedRoutes) -> Tensor:
    """Copy each token to its k sorted rows: [n, h] -> [n*k, h]."""
    return _Permute.apply(tokens, order)


def unpermute(rows: Tensor, order: SortedRoutes) -> Tensor:
    """Sum each token's k rows, in fp32 and in the order of its choices: [n*k, h] -> [n, h]."""
    return _Unpermute.apply(rows, order)


def sort_weights(weights: Tensor, order: SortedRoutes) -> Tensor:
    """Weights [n, k] of the routes, in the order of the rows: [n*k]."""
    return _SortWeights.apply(weights, order)


def _gather(tokens: Tensor, order: SortedRoutes) -> Tensor:
    return tokens.index_select(0, order.source // order.top_k)


def _sum(rows: Tensor, order: SortedRoutes) -> Tensor:
    if rows.is_cuda and rows.dtype is not torch.float64:
        from k3train.kernels.triton_permute import gather_sum

        return gather_sum(rows, order.position, order.top_k)
    grouped = rows.index_select(0, order.position).view(-1, order.top_k, rows.shape[1])
    wide = torch.float64 if rows.dtype is torch.float64 else torch.float32
    return grouped.sum(1, dtype=wide).to(rows.dtype)


# Each one's backward pass is the other's forward: plain indexing would add into rows in no fixed order.


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: SortedRoutes) -> Tensor:
        ctx.order = order
        return _gather(tokens, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.order), None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: SortedRoutes) -> Tensor:
        ctx.order = order
        return _sum(rows, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather(grad, ctx.order), None


class _SortWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, order: SortedRoutes) -> Tensor:
        ctx.order = order
        return weights.reshape(-1).index_select(0, order.source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.order.position).view(-1, ctx.order.top_k), None
