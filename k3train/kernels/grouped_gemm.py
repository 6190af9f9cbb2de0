"""One matrix product per expert, over rows that lie sorted by expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from k3train.backend.derivative import once_differentiable
from k3train.kernels.main_grad import add_product, added, main_grad


def grouped_mm(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """As ``grouped_mms`` with one weight."""
    return grouped_mms(rows, [weight], counts)[0]


def grouped_mms(rows: Tensor, weights: Sequence[Tensor], counts: Tensor) -> tuple[Tensor, ...]:
    """Multiply each group of rows with its own matrix of each weight.

    ``rows`` [t, k], the first counts[0] of them for weight[0] and so on; each weight [experts, k, n];
    ``counts`` int64 [experts], on any device, sums to t, zeros allowed. Returns [t, n] of each weight in the
    dtype of ``rows``. With bf16 on a GPU and k and n multiples of 8 each is one kernel that reads counts on
    the device; else a loop that needs them on the host. Weights' gradients go where ``main_grad`` says.
    """
    # its rows must start at 16 bytes
    aligned = all(weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0 for weight in weights)
    if rows.is_cuda and rows.dtype is torch.bfloat16 and aligned:
        from k3train.kernels.triton_grouped import list_groups

        groups = list_groups(counts.to(rows.device, non_blocking=True), rows.shape[0])
        return _FusedGroupedMm.apply(rows, *groups, *weights)  # pyright: ignore[reportReturnType]
    hosted = tuple(counts.tolist())
    return tuple(_GroupedMm.apply(rows, weight, hosted) for weight in weights)  # pyright: ignore


class _FusedGroupedMm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, ends: Tensor, tiles: Tensor, total: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        from k3train.kernels.triton_grouped import Groups, multiply

        rows = rows if _is_even(rows) else rows.contiguous()
        ctx.save_for_backward(rows, ends, tiles, total, *weights)
        return multiply(rows, weights, Groups(ends, tiles, total))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from k3train.kernels import triton_grouped

        rows, ends, tiles, total, *weights = ctx.saved_tensors
        groups = triton_grouped.Groups(ends, tiles, total)
        rows.new_zeros(1)  # autograd's threads begin without a CUDA context, which tensor maps need
        even = [grad if _is_even(grad) else grad.contiguous() for grad in grads]
        back = triton_grouped.multiply_back(even, weights, groups) if ctx.needs_input_grad[0] else None
        grad_weights: list[Tensor | None] = []
        for weight, grad, needed in zip(weights, even, ctx.needs_input_grad[4:], strict=True):
            total = main_grad(weight)
            if not needed:
                grad_weights.append(None)
            elif total is None:
                grad_weights.append(F.grouped_mm(rows.t(), grad.contiguous(), offs=groups.ends))
            else:
                triton_grouped.add_weight_gradient(total, rows, grad, groups.ends)
                grad_weights.append(added(weight))
        return back, None, None, None, *grad_weights


def _is_even(x: Tensor) -> bool:
    """Whether rows of ``x`` [t, n] lie apart and start at 16 bytes."""
    return x.stride(1) == 1 and x.stride(0) >= x.shape[1] and x.stride(0) % 8 == x.storage_offset() % 8 == 0


class _GroupedMm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.counts = counts
        out = rows.new_empty(rows.shape[0], weight.shape[2])
        for expert, start, stop in _groups(counts):
            torch.mm(rows[start:stop], weight[expert], out=out[start:stop])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        grad_rows, total = torch.empty_like(rows), main_grad(weight)
        trained = ctx.needs_input_grad[1]
        sums = torch.zeros_like(weight) if total is None else total
        for expert, start, stop in _groups(ctx.counts):
            torch.mm(grad[start:stop], weight[expert].t(), out=grad_rows[start:stop])
            if trained:
                add_product(sums[expert], rows[start:stop].t(), grad[start:stop])
        if not trained:
            return grad_rows, None, None
        return grad_rows, sums if total is None else added(weight), None


def _groups(counts: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(expert, first row, end) of the experts that have rows."""
    found, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            found.append((expert, start, start + count))
        start += count
    return found
