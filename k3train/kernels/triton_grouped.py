"""Experts' products where the GPU has kernels for them. Import only where a GPU is: this imports Triton.

Products of narrow experts are persistent kernels on Hopper (``triton_experts``), all others torch's grouped
product; weight gradients are added in fp32 by a Triton kernel. Legend: t rows sorted by expert, k inputs, n
outputs.
"""

# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from k3train.kernels.adjacent import joined
from k3train.kernels.hopper import is_hopper

_ROWS = 128
"""Rows of a tile, as in ``triton_experts``."""
_WIDEST = 1024
"""Widest side of an expert's matrix for which the Hopper kernel was faster than torch's; at 3584 x 3072
torch's makes 538 TFLOP/s forward, the other 424."""


class Groups(NamedTuple):
    """Which rows are an expert's, on the device."""

    ends: Tensor
    """int32 [experts]: end of each expert's rows."""
    tiles: Tensor
    """int32 [most tiles, 3]: first row, end of the expert's rows, and expert of each tile of rows."""
    total: Tensor
    """int32 [1]: how many tiles there are."""


def list_groups(counts: Tensor, rows: int) -> Groups:
    """``counts`` int64 [experts] on the device, which sum to ``rows``: in tiles of 128 rows, none of two
    experts."""
    experts = counts.numel()
    most = rows // _ROWS + experts
    ends = torch.empty(experts, dtype=torch.int32, device=counts.device)
    tiles, total = ends.new_empty(most, 3), ends.new_empty(1)
    lanes = triton.next_power_of_2(experts)
    block = max(1, 4096 // lanes)
    _list_groups[(triton.cdiv(most, block),)](
        counts, ends, tiles, total, experts, ROWS=_ROWS, LANES=lanes, BLOCK=block
    )
    return Groups(ends, tiles, total)


def multiply(rows: Tensor, weights: Sequence[Tensor], groups: Groups) -> tuple[Tensor, ...]:
    """Rows [t, k] times their expert's matrix of each weight [experts, k, n]: each [t, n], side by side."""
    k, n = weights[0].shape[1:]
    if not _fits(rows, weights):
        return tuple(F.grouped_mm(rows, weight, offs=groups.ends) for weight in weights)
    out = rows.new_empty(rows.shape[0], len(weights) * n)
    _products(rows, weights, out, groups, k, n, back=False)
    return out.split(n, -1)


def multiply_back(grads: Sequence[Tensor], weights: Sequence[Tensor], groups: Groups) -> Tensor:
    """Grads [t, n] times their expert's transposed matrix of each weight [experts, k, n], summed: [t, k]."""
    k, n = weights[0].shape[1:]
    if not _fits(grads[0], weights):
        pairs = zip(grads, weights, strict=True)
        parts = (F.grouped_mm(g.contiguous(), w.transpose(1, 2), offs=groups.ends) for g, w in pairs)
        return reduce(Tensor.add_, parts)
    whole = joined(grads, -1)
    if whole is None or whole.stride(1) != 1:
        whole = torch.cat(list(grads), -1)
    out = whole.new_empty(whole.shape[0], k)
    _products(whole, weights, out, groups, n, k, back=True)
    return out


def add_weight_gradient(total: Tensor, rows: Tensor, grad: Tensor, ends: Tensor) -> None:
    """total [experts, k, n] += rows [t, k] of each expert, transposed, times grad [t, n].

    ``total`` fp32 and contiguous, ``rows`` and ``grad`` with unit stride along channels, ``ends`` int32
    [experts]: end of each expert's rows. A program takes a tile of one expert's matrix and that expert's
    rows; each element of the sum is read and written once.
    """
    experts, k, n = total.shape
    tile = 128 if rows.dtype is torch.bfloat16 else 32
    # Tiles of one expert run after one another: its rows then come from the L2 cache.
    _add_weight_gradient[(triton.cdiv(k, tile) * triton.cdiv(n, tile), experts)](
        total, rows, rows.stride(0), grad, grad.stride(0), ends, k, n,
        TILE=tile, STEP=min(64, tile), num_warps=4, num_stages=3,
    )  # fmt: skip


def is_narrow(weight: Tensor) -> bool:
    """Whether experts' matrices [experts, k, n] are as small as those that were faster so."""
    return max(weight.shape[1:]) <= _WIDEST


def _fits(rows: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether the Hopper kernel takes such operands: one or two narrow weights of one shape, and any row."""
    if not is_narrow(weights[0]):
        return False
    known = rows.dtype is torch.bfloat16 and rows.shape[0] > 0 and len(weights) <= 2
    alike = weights[0].shape == weights[-1].shape and all(weight.is_contiguous() for weight in weights)
    return known and alike and rows.is_cuda and is_hopper(rows.device)[0]


def _products(
    rows: Tensor, weights: Sequence[Tensor], out: Tensor, groups: Groups, k: int, n: int, *, back: bool
) -> None:
    from k3train.kernels.triton_experts import COLUMNS, ROWS, STEP, WARPS, products

    block = (COLUMNS.value, STEP.value) if back else (STEP.value, COLUMNS.value)
    first, second = (
        _blocks(weight.view(-1, weight.shape[2]), *block) for weight in (weights[0], weights[-1])
    )
    kernel: Any = products
    kernel[(2 * _processors(rows.device),)](
        _blocks(rows, ROWS.value, STEP.value), first, second, out, out.stride(0), groups.tiles, groups.total,
        K=k, N=n, PARTS=len(weights), BACK=back, num_warps=WARPS.value, maxnreg=128,
    )  # fmt: skip


@lru_cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _blocks(x: Tensor, rows: int, columns: int) -> Any:
    """Matrix ``x``, copied in such blocks by the bulk copy engine."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns], layout)


@triton.jit
def _list_groups(
    counts, ends, tiles, total, experts, ROWS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr
):
    lane = tl.arange(0, LANES)
    count = tl.load(counts + lane, mask=lane < experts, other=0).to(tl.int32)
    need = (count + ROWS - 1) // ROWS
    end, after = tl.cumsum(count, 0), tl.cumsum(need, 0)
    if tl.program_id(0) == 0:
        tl.store(ends + lane, end, mask=lane < experts)
        tl.store(total, tl.sum(need, 0))
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = (tile[:, None] < after[None, :]) & (tile[:, None] >= (after - need)[None, :])
    first = end - count + (tile[:, None] - (after - need)[None, :]) * ROWS
    known = tile < tl.sum(need, 0)
    tl.store(tiles + 3 * tile, tl.sum(tl.where(mine, first, 0), 1), mask=known)
    tl.store(tiles + 3 * tile + 1, tl.sum(tl.where(mine, end[None, :], 0), 1), mask=known)
    tl.store(tiles + 3 * tile + 2, tl.sum(tl.where(mine, lane[None, :], 0), 1), mask=known)


@triton.jit
def _add_weight_gradient(
    total, rows, rows_stride, grad, grad_stride, ends, k, n, TILE: tl.constexpr, STEP: tl.constexpr
):
    expert = tl.program_id(1)
    tiles = tl.cdiv(n, TILE)
    at_k = (tl.program_id(0) // tiles) * TILE + tl.arange(0, TILE)
    at_n = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    stop = tl.load(ends + expert)
    if start < stop:
        at = total + expert.to(tl.int64) * k * n + at_k[:, None].to(tl.int64) * n + at_n[None, :]
        within = (at_k < k)[:, None] & (at_n < n)[None, :]
        sums = tl.load(at, mask=within, other=0.0)
        for first in range(start, stop, STEP):
            row = (first + tl.arange(0, STEP)).to(tl.int64)[:, None]
            inside = row < stop
            x = tl.load(
                rows + row * rows_stride + at_k[None, :], mask=inside & (at_k < k)[None, :], other=0.0
            )
            g = tl.load(
                grad + row * grad_stride + at_n[None, :], mask=inside & (at_n < n)[None, :], other=0.0
            )
            sums = tl.dot(tl.trans(x), g, sums)
        tl.store(at, sums, mask=within)
