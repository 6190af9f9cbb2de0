"""Routed rows, their order and their sums, as Triton kernels. Import only where a GPU is: this imports
Triton.
"""

# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def gather_sum(rows: Tensor, position: Tensor, top_k: int) -> Tensor:
    """out[i] = sum over j < top_k of rows[position[i * top_k + j]], added in fp32 in the order of j.

    rows [t, h] contiguous; position int64 [n * top_k] -> [n, h] in the dtype of ``rows``.
    """
    rows = rows.contiguous()
    width = rows.shape[1]
    out = rows.new_empty(position.numel() // top_k, width)
    if out.numel():
        block = min(1024, triton.next_power_of_2(width))
        _gather_sum[(out.shape[0], triton.cdiv(width, block))](
            rows, position, out, width, TOP_K=top_k, BLOCK=block
        )
    return out


def invert(source: Tensor, experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Of the order ``source`` int64 [n] of ``experts`` [n]: the place of each, and how many each expert has,
    int64 [num_experts]."""
    position = torch.empty_like(source)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=source.device)
    if source.numel():
        _invert[(triton.cdiv(source.numel(), 1024),)](
            source, experts, position, counts, source.numel(), num_experts,
            BLOCK=1024, LANES=triton.next_power_of_2(num_experts + 1),
        )  # fmt: skip
    return position, counts


@triton.jit
def _invert(source, experts, position, counts, n, num_experts, BLOCK: tl.constexpr, LANES: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < n
    tl.store(position + tl.load(source + row, mask=inside, other=0), row.to(tl.int64), mask=inside)
    expert = tl.load(experts + row, mask=inside, other=num_experts).to(tl.int32)
    lane = tl.arange(0, LANES)
    found = tl.histogram(expert, LANES).to(tl.int64)
    # integers: their order does not matter
    tl.atomic_add(counts + lane, found, mask=(lane < num_experts) & (found > 0), sem="relaxed")


@triton.jit
def _gather_sum(rows, position, out, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < width
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        row = tl.load(position + token * TOP_K + choice)
        total += tl.load(rows + row * width + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + channel, total.to(out.dtype.element_ty), mask=inside)
