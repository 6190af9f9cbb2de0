"""Adds up what a kernel's programs leave, in a fixed order. Import only where a GPU is: it imports Triton."""

# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS, _ROWS = 16, 256
"""Of a program: a row's 64 bytes are what memory gives at once, and hundreds of rows are under way."""


def add_up(partial: Tensor) -> Tensor:
    """Column sums, fp32 [c], of contiguous fp32 ``partial`` [programs, c], where torch has few programs."""
    rows, columns = partial.shape
    out = torch.empty(columns, dtype=torch.float32, device=partial.device)
    _add_up[(triton.cdiv(columns, _COLUMNS),)](
        partial, out, rows, columns, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=8
    )
    return out


@triton.jit
def _add_up(partial, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, rows, ROWS):
        row = (first + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        total += tl.load(partial + row * columns + column, mask=(row < rows) & (column < columns), other=0.0)
    total = tl.sum(total, 0)[None, :]
    tl.store(out + column, total, mask=column < columns)
