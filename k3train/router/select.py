"""Top-k with a selection bias, and the counts of a step, in one place: plain torch here, Triton on a GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Tally(NamedTuple):
    """Where a micro-batch is counted."""

    loads: Tensor
    """int64 [experts]"""
    histogram: Tensor | None
    """int32 [experts, bins], of margins."""
    bounds: Tensor
    """fp32 [2]: ends of the histogram."""
    valid: Tensor | None
    """bool [n], False for tokens that are not counted; None counts all."""


class Selection(NamedTuple):
    """Who is chosen."""

    experts: Tensor
    """int64 [n, k], best first."""
    cutoff: Tensor
    """[n]: the (k+1)-th biased score, against which the others were measured; the last when k = experts."""


@torch.no_grad()
def select(logits: Tensor, bias: Tensor, top_k: int, tally: Tally | None) -> Selection:
    """The ``top_k`` largest of sigmoid(logits) + bias, counted into ``tally``; no gradient.

    logits [n, experts] fp32 (or fp64), bias fp32 [experts]. Raises ValueError for other shapes and for a
    ``top_k`` that is not from 1 to the number of experts.
    """
    if logits.ndim != 2 or bias.shape != logits.shape[1:]:
        raise ValueError(
            f"logits have shape {tuple(logits.shape)} and bias {tuple(bias.shape)}: select needs "
            "[n, experts] and [experts]"
        )
    if not 1 <= top_k <= len(bias):
        raise ValueError(f"top_k = {top_k} must be at least 1 and at most the {len(bias)} experts")
    if _is_fused(logits, top_k):
        from k3train.router import triton_select

        return Selection(*triton_select.select(logits, bias, top_k, tally))
    return select_reference(logits, bias, top_k, tally)


def _is_fused(logits: Tensor, top_k: int) -> bool:
    """One read of the logits instead of some ten passes over memory."""
    return logits.is_cuda and logits.dtype is torch.float32 and top_k < logits.shape[-1] <= 4096


@torch.no_grad()
def select_reference(logits: Tensor, bias: Tensor, top_k: int, tally: Tally | None) -> Selection:
    """``select`` in plain torch, on any device; of equal scores any may be chosen."""
    scores = torch.sigmoid(logits)
    # One more than is used: the first expert not chosen is the bar the others were measured against.
    best = (scores + bias).topk(min(top_k + 1, logits.shape[-1]), dim=-1)
    experts, cutoff = best.indices[:, :top_k], best.values[:, -1]
    if tally is not None:
        one = torch.ones_like(experts)
        if tally.valid is not None:
            one = tally.valid.unsqueeze(-1).expand_as(experts).long()
        tally.loads.scatter_add_(0, experts.reshape(-1), one.reshape(-1))
        if tally.histogram is not None:
            count_margins(scores, cutoff, tally.valid, tally.bounds, tally.histogram)
    return Selection(experts, cutoff)


@torch.no_grad()
def count_margins(
    scores: Tensor, cutoff: Tensor, valid: Tensor | None, bounds: Tensor, histogram: Tensor
) -> None:
    """Add the margins cutoff_i - score_ij of valid tokens to ``histogram``, int32 [experts, bins].

    Bins divide ``bounds`` evenly; what lies outside is counted in the first or the last.
    """
    experts, bins = histogram.shape
    low, high = bounds.unbind()
    margin = cutoff.unsqueeze(-1).float() - scores.float()
    # Times bins per unit: dividing by the rounded bin width would move margins on a border, such as 0.
    cell = ((margin - low) * (bins / (high - low))).floor_().long().clamp_(0, bins - 1)
    cell += bins * torch.arange(experts, device=cell.device)
    one = torch.ones_like(cell[:, 0], dtype=torch.int32) if valid is None else valid.to(torch.int32)
    # Invalid tokens add 0: dropping their rows instead would need their number on the host.
    histogram.view(-1).scatter_add_(0, cell.view(-1), one.repeat_interleave(experts))
