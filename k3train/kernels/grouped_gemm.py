"""One matrix product per expert, over rows that lie sorted by expert."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_mm(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiply each group of rows with its own matrix.

    ``rows`` [t, k], the first counts[0] of them for weight[0] and so on; ``weight`` [experts, k, n];
    ``counts`` int64 [experts], on any device, sums to t, zeros allowed. Returns [t, n] in the dtype of
    ``rows``. With bf16 on a GPU and k and n multiples of 8 it is one kernel that reads counts on the device;
    else a loop that needs them on the host.
    """
    aligned = weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0  # its rows must start at 16 bytes
    if rows.is_cuda and rows.dtype is torch.bfloat16 and aligned:
        ends = counts.to(rows.device, non_blocking=True).cumsum(0).to(torch.int32)
        return F.grouped_mm(rows, weight, offs=ends)
    return _GroupedMm.apply(rows, weight, tuple(counts.tolist()))


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
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight = ctx.saved_tensors
        grad_rows, grad_weight = torch.empty_like(rows), torch.zeros_like(weight)
        for expert, start, stop in _groups(ctx.counts):
            torch.mm(grad[start:stop], weight[expert].t(), out=grad_rows[start:stop])
            torch.mm(rows[start:stop].t(), grad[start:stop], out=grad_weight[expert])
        return grad_rows, grad_weight, None


def _groups(counts: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(expert, first row, end) of the experts that have rows."""
    found, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            found.append((expert, start, start + count))
        start += count
    return found
