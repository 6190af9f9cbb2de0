"""Gather-and-sum of routed rows as a Triton kernel. Import only where a GPU is: this imports Triton."""

# pyright: reportMissingImports=false, reportArgumentType=false

from __future__ import annotations

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
