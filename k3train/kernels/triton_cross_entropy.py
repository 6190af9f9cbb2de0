"""Softmax statistics and gradient of bf16 logits as Triton kernels. Import only where a GPU is.

A program takes a row of logits: one read for the statistics, one read and one write for the gradient.
"""

# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3train.kernels.triton_math import exp

_BLOCK = 4096


def statistics(logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row of logits [n, v]: maximum, sum of exp(logit - maximum), logit at index [n]; fp32 [n]."""
    n, v = logits.shape
    top, total, picked = torch.empty(3, n, dtype=torch.float32, device=logits.device).unbind()
    _cross_entropy_statistics[(n,)](logits, index, top, total, picked, V=v, BLOCK=_BLOCK, num_warps=8)
    return top, total, picked


def gradient_(logits: Tensor, index: Tensor, mine: Tensor, normalizer: Tensor, grad: Tensor) -> Tensor:
    """Overwrite logits [n, v] with grad * (exp(logit - normalizer) - 1 at index where mine).

    index int64, mine bool, normalizer and grad fp32: all [n].
    """
    n, v = logits.shape
    grid = (n, triton.cdiv(v, _BLOCK))
    _cross_entropy_gradient[grid](logits, index, mine, normalizer, grad, v, BLOCK=_BLOCK, num_warps=8)
    return logits


@triton.jit
def _cross_entropy_statistics(logits, index, top, total, picked, V: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    column = tl.arange(0, BLOCK)
    # one running maximum a lane: rows are reduced only once, at the end
    best = tl.full([BLOCK], -1.0e30, tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        inside = start + column < V
        x = tl.load(logits + start + column, mask=inside, other=-1.0e30).to(tl.float32)
        # of the two exponentials, of the old maximum and of x over the new one, one is 1
        e = exp(-tl.abs(x - best))
        sums = tl.where(x > best, sums * e + 1.0, sums + tl.where(inside, e, 0.0))
        best = tl.maximum(best, x)
    row_top = tl.max(best)
    tl.store(top + row, row_top)
    tl.store(total + row, tl.sum(sums * exp(best - row_top)))
    tl.store(picked + row, tl.load(logits + tl.load(index + row)).to(tl.float32))


@triton.jit
def _cross_entropy_gradient(logits, index, mine, normalizer, grad, v, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < v
    x = tl.load(logits + row * v + column, mask=inside, other=0.0).to(tl.float32)
    p = exp(x - tl.load(normalizer + row))
    hit = (column == tl.load(index + row)) & (tl.load(mine + row) != 0)
    d = (p - tl.where(hit, 1.0, 0.0)) * tl.load(grad + row)
    tl.store(logits + row * v + column, d.to(logits.dtype.element_ty), mask=inside)
