"""A closer look at one step of one router, on demand: it keeps every score of the step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from k3train.router.quantile_exact import exact_quantile, gather_rows


class Audit:
    """The scores and cutoffs of one step's valid tokens on this rank: 4 bytes a token and expert."""

    def __init__(self, top_k: int) -> None:
        self.top_k = top_k
        self.scores: list[Tensor] = []
        self.cutoffs: list[Tensor] = []

    @torch.no_grad()
    def observe(self, logits: Tensor, cutoff: Tensor, valid: Tensor | None) -> None:
        """Keep one micro-batch: logits [n, experts], (k+1)-th biased score [n], bool mask [n] or None."""
        kept = slice(None) if valid is None else valid
        self.scores.append(torch.sigmoid(logits[kept].float()))
        self.cutoffs.append(cutoff[kept].float())

    @torch.no_grad()
    def report(self, bias: Tensor, group: Any) -> dict[str, float]:
        """What ``bias``, fp32 [experts], just found from this step, is worth; every rank of ``group`` must
        call this.

        ``exact_error``: largest difference from the centred exact quantile of the step's margins, which all
        ranks gather. ``own_violation``: max violation that this same batch would have under ``bias``.
        """
        scores = torch.cat([bias.new_empty(0, len(bias)), *self.scores])
        cutoff = torch.cat([bias.new_empty(0), *self.cutoffs])
        margins = gather_rows(cutoff.unsqueeze(-1) - scores, group)
        if len(margins) == 0:
            return {"exact_error": 0.0, "own_violation": 0.0}
        exact = exact_quantile(margins, self.top_k).double()
        error = (exact - exact.mean() - bias.double()).abs().max()
        loads = torch.bincount((scores + bias).topk(self.top_k).indices.flatten(), minlength=len(bias))
        if group is not None and group.size() > 1:
            dist.all_reduce(loads, group=group)
        mean = loads.double().mean()
        return {"exact_error": float(error), "own_violation": float(loads.max() / mean - 1)}
