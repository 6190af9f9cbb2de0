"""The embedding's gradient as a Triton kernel. Import only where a GPU is: this imports Triton."""

# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS, _CHANNELS = 4, 512
"""Equal tokens, and channels, that a program loads at once."""


def add_rows(total: Tensor, grad: Tensor, rows: Tensor) -> None:
    """total[rows[i]] += grad[i] in the order of i, in fp32; ``rows`` beyond the last are left out.

    total [v, c] fp32, grad [n, c], rows int64 [n].
    """
    grad = grad.contiguous()
    ordered, source = torch.sort(rows, stable=True)
    v, c = total.shape
    if rows.numel():
        _add_rows[(rows.numel(), triton.cdiv(c, _CHANNELS))](
            total, grad, ordered, source, rows.numel(), v, c, TOKENS=_TOKENS, CHANNELS=_CHANNELS
        )


@triton.jit
def _add_rows(total, grad, ordered, source, n, v, c, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    # The program of the first of equal rows adds them all.
    first = tl.program_id(0)
    row = tl.load(ordered + first)
    before = tl.load(ordered + first - 1, mask=first > 0, other=-1)
    if (row < v) & (row != before):
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        inside = channel < c
        at = total + row * c + channel
        sums = tl.load(at, mask=inside, other=0.0)
        found = TOKENS
        while found == TOKENS:
            found = 0
            for i in tl.static_range(TOKENS):
                same = tl.load(ordered + first + i, mask=first + i < n, other=v) == row
                token = tl.load(source + first + i, mask=same, other=0)
                part = tl.load(grad + token * c + channel, mask=inside & same, other=0.0)
                sums += part.to(tl.float32)
                found += same.to(tl.int32)
            first += TOKENS
        tl.store(at, sums, mask=inside)
