"""Weight gradients of the experts, added in fp32, as a Triton kernel. Import only where a GPU is.

A program takes a tile of one expert's matrix and that expert's rows; each element of the sum is read and
written once. Legend: t rows sorted by expert, k inputs, n outputs.
"""

# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def add_weight_gradient(total: Tensor, rows: Tensor, grad: Tensor, ends: Tensor) -> None:
    """total [experts, k, n] += rows [t, k] of each expert, transposed, times grad [t, n].

    ``total`` fp32, ``rows`` and ``grad`` contiguous, ``ends`` int32 [experts]: end of each expert's rows.
    """
    experts, k, n = total.shape
    tile = 128 if rows.dtype is torch.bfloat16 else 32
    # Tiles of one expert run after one another: its rows then come from the L2 cache.
    _add_weight_gradient[(triton.cdiv(k, tile) * triton.cdiv(n, tile), experts)](
        total, rows, grad, ends, k, n, TILE=tile, STEP=min(64, tile), num_warps=4, num_stages=3
    )


@triton.jit
def _add_weight_gradient(total, rows, grad, ends, k, n, TILE: tl.constexpr, STEP: tl.constexpr):
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
            x = tl.load(rows + row * k + at_k[None, :], mask=inside & (at_k < k)[None, :], other=0.0)
            g = tl.load(grad + row * n + at_n[None, :], mask=inside & (at_n < n)[None, :], other=0.0)
            sums = tl.dot(tl.trans(x), g, sums)
        tl.store(at, sums, mask=within)
