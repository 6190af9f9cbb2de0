"""Score, top-(k+1), loads and histogram in one Triton kernel, one read of the logits.

Import only where a GPU is: this imports Triton.
"""

# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from k3train.router.select import Tally


def select(logits: Tensor, bias: Tensor, top_k: int, tally: Tally | None) -> tuple[Tensor, Tensor]:
    """As ``select.select`` with top_k < experts: logits fp32 [n, experts] -> experts int64 [n, k] and cutoff
    fp32 [n]; counts are added to ``tally`` atomically, in integers, so that their order does not matter."""
    logits = logits.contiguous()
    n, experts = logits.shape
    chosen = torch.empty(n, top_k, dtype=torch.int64, device=logits.device)
    cutoff = torch.empty(n, dtype=torch.float32, device=logits.device)
    histogram = None if tally is None else tally.histogram
    valid = None if tally is None else tally.valid
    if n:
        _select[(n,)](
            logits,
            bias,
            chosen,
            cutoff,
            chosen if tally is None else tally.loads,
            cutoff if tally is None or histogram is None else histogram,
            cutoff if tally is None else tally.bounds,
            chosen if valid is None else valid.view(torch.uint8),
            experts,
            0 if histogram is None else histogram.shape[1],
            TOP_K=top_k,
            LANES=triton.next_power_of_2(experts),
            COUNTED=tally is not None,
            BINNED=histogram is not None,
            MASKED=valid is not None,
            num_warps=1 if experts <= 1024 else 4,
        )
    return chosen, cutoff


@triton.jit
def _select(
    logits,
    bias,
    chosen,
    cutoff,
    loads,
    histogram,
    bounds,
    valid,
    experts,
    bins,
    TOP_K: tl.constexpr,
    LANES: tl.constexpr,
    COUNTED: tl.constexpr,
    BINNED: tl.constexpr,
    MASKED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    inside = lane < experts
    score = tl.sigmoid(tl.load(logits + row * experts + lane, mask=inside, other=0.0))
    biased = score + tl.load(bias + lane, mask=inside, other=0.0)
    # A float's bits, with all but the sign flipped when it is negative, order as the float does. The lane
    # below it makes keys distinct: of equal scores the first expert wins, and one maximum finds value and
    # place.
    bits = biased.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = (ordered.to(tl.int64) << 32) | (LANES - 1 - lane).to(tl.int64)
    lowest = -0x7FFFFFFFFFFFFFFF
    key = tl.where(inside, key, lowest)
    counts = True
    if MASKED:
        counts = tl.load(valid + row) != 0
    for place in range(TOP_K):
        best = tl.max(key, 0)
        expert = LANES - 1 - (best & 0xFFFFFFFF)
        tl.store(chosen + row * TOP_K + place, expert)
        if COUNTED:
            tl.atomic_add(loads + expert, tl.full((), 1, tl.int64), mask=counts, sem="relaxed")
        key = tl.where(key == best, lowest, key)
    # The first expert not chosen is the bar the others were measured against.
    found = (tl.max(key, 0) >> 32).to(tl.int32)
    bar = tl.where(found < 0, found ^ 0x7FFFFFFF, found).to(tl.float32, bitcast=True)
    tl.store(cutoff + row, bar)
    if BINNED:
        low = tl.load(bounds)
        scale = bins / (tl.load(bounds + 1) - low)
        cell = tl.floor((bar - score - low) * scale).to(tl.int32)
        cell = tl.minimum(tl.maximum(cell, 0), bins - 1)
        at = histogram + lane.to(tl.int64) * bins + cell
        tl.atomic_add(at, tl.full((LANES,), 1, tl.int32), mask=inside & counts, sem="relaxed")
