"""What a router does around its matrix products, as Triton kernels. Import only where a GPU is: this imports
Triton. Each stands for some ten launches, of which most would take longer to start than to run.

Legend: n tokens, k choices of each.
"""

# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def split(x: Tensor, terms: tuple[int, ...], *, across: bool) -> Tensor:
    """As ``logits.split_terms``."""
    x = x.contiguous()
    rows, columns = x.shape
    shape = (rows, len(terms) * columns) if across else (len(terms) * rows, columns)
    out = torch.empty(shape, dtype=torch.bfloat16, device=x.device)
    if x.numel():
        block = min(_BLOCK, triton.next_power_of_2(columns))
        _split[(rows, triton.cdiv(columns, block))](
            x, out, columns, out.stride(0), columns if across else rows * columns, TERMS=terms, BLOCK=block
        )
    return out


def add_terms(small: Tensor, middle: Tensor, large: Tensor) -> Tensor:
    """(small + middle) + large, fp32 [rows, columns] of equal strides along rows."""
    rows, columns = small.shape
    out = torch.empty(rows, columns, dtype=torch.float32, device=small.device)
    if out.numel():
        block = min(_BLOCK, triton.next_power_of_2(columns))
        _add_terms[(rows, triton.cdiv(columns, block))](
            small, middle, large, small.stride(0), out, columns, BLOCK=block
        )
    return out


def weights(logits: Tensor, experts: Tensor, tiny: float) -> Tensor:
    """As ``weights.route_weights``: fp32 [n, k] from logits fp32 [n, all experts] and ``experts`` [n, k]."""
    n, k = experts.shape
    out = torch.empty(n, k, dtype=torch.float32, device=logits.device)
    if n:
        _weights[(triton.cdiv(n, 64),)](
            logits, experts, out, n, logits.shape[1], tiny, K=k, LANES=triton.next_power_of_2(k), ROWS=64
        )
    return out


def weights_backward(grad: Tensor, logits: Tensor, experts: Tensor, tiny: float) -> Tensor:
    """The logits' gradient, fp32 [n, all experts], from that of the weights [n, k]."""
    out = torch.empty_like(logits)
    n, k = experts.shape
    lanes, all = triton.next_power_of_2(k), triton.next_power_of_2(logits.shape[1])
    if n:
        _weights_backward[(n,)](
            grad, logits, experts, out, logits.shape[1], tiny,
            K=k, LANES=lanes, ALL=all, num_warps=max(1, min(8, lanes * all // 2048)),
        )  # fmt: skip
    return out


@triton.jit
def _split(x, out, columns, stride, slot, TERMS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    rest = tl.load(x + row * columns + column, mask=inside, other=0.0)
    at = out + row * stride + column
    for term in tl.static_range(3):
        part = rest.to(tl.bfloat16)
        rest -= part.to(tl.float32)
        for i in tl.static_range(len(TERMS)):
            if TERMS[i] == term:
                tl.store(at + i * slot, part, mask=inside)


@triton.jit
def _add_terms(small, middle, large, stride, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    at = row * stride + column
    total = tl.load(small + at, mask=inside, other=0.0) + tl.load(middle + at, mask=inside, other=0.0)
    total += tl.load(large + at, mask=inside, other=0.0)
    tl.store(out + row * columns + column, total, mask=inside)


@triton.jit
def _weights(logits, experts, out, n, all, tiny, K: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    choice = tl.arange(0, LANES)[None, :]
    inside = (row < n) & (choice < K)
    expert = tl.load(experts + row * K + choice, mask=inside, other=0)
    score = tl.sigmoid(tl.load(logits + row * all + expert, mask=inside, other=-float("inf")))
    tl.store(out + row * K + choice, score / (tl.sum(score, 1)[:, None] + tiny), mask=inside)


@triton.jit
def _weights_backward(
    grad, logits, experts, out, all, tiny, K: tl.constexpr, LANES: tl.constexpr, ALL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    choice = tl.arange(0, LANES)
    inside = choice < K
    expert = tl.load(experts + row * K + choice, mask=inside, other=0)
    score = tl.sigmoid(tl.load(logits + row * all + expert, mask=inside, other=-float("inf")))
    d = tl.load(grad + row * K + choice, mask=inside, other=0.0)
    total = tl.sum(score, 0) + tiny
    slope = (d - tl.sum(d * score, 0) / total) / total * score * (1.0 - score)
    lane = tl.arange(0, ALL)
    mine = (lane[:, None] == expert[None, :]) & inside[None, :]
    tl.store(out + row * all + lane, tl.sum(tl.where(mine, slope[None, :], 0.0), 1), mask=lane < all)
