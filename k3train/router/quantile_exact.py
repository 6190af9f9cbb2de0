"""Quantile balancing without a histogram, for tests and small runs: margins are kept and sorted."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from k3train.config import schema
from k3train.router.contract import BalanceRule
from k3train.router.smooth import Smooth

_UNIT = 2**30
"""Micro-batch quantiles are summed as whole multiples of 1/_UNIT, so that order does not matter; with 64
bits, 2^30 tokens fit."""


class ExactQuantileBalance(BalanceRule):
    """The (q+1)-th smallest margin, q = tokens * k / E: k3 report eq. 14 to the letter.

    Over the global batch every rank keeps its margins, 4 bytes a token and expert, and gathers everyone's at
    the end of the step. Over micro-batches each rank takes the quantile of its own tokens of each one, and
    the bias is their mean, weighted by tokens; it depends on how the batch is cut up.
    """

    total: Tensor
    """int64 [experts, 1]: sum over micro-batches of tokens times quantile, in units of 1/_UNIT."""

    def __init__(
        self, num_experts: int, top_k: int, settings: schema.QuantileExact, smoothing: schema.Quantile
    ) -> None:
        super().__init__(num_experts)
        self.top_k = top_k
        self.pooled = settings.scope is schema.BalanceScope.global_batch
        self.num_statistics = 0 if self.pooled else 1
        self.margins: list[Tensor] = []
        self.register_buffer("total", torch.zeros(num_experts, 1, dtype=torch.int64), persistent=False)
        self.smooth = Smooth(num_experts, smoothing.window, smoothing.strength)

    @torch.no_grad()
    def observe(self, logits: Tensor, cutoff: Tensor, valid: Tensor | None) -> None:
        """Keep the margins cutoff_i - score_ij of valid tokens, or their quantile."""
        margins = cutoff.unsqueeze(-1).float() - torch.sigmoid(logits.float())
        if valid is not None:
            margins = margins[valid]
        if self.pooled:
            self.margins.append(margins)
        elif len(margins):
            units = (exact_quantile(margins, self.top_k).double() * _UNIT).round_().long()
            self.total += len(margins) * units.unsqueeze(-1)

    def statistics(self) -> Tensor:
        """int64 [experts, 1] for micro-batches, [experts, 0] for the global batch."""
        return super().statistics() if self.pooled else self.total.clone()

    @torch.no_grad()
    def next_bias(
        self, bias: Tensor, bounds: Tensor, loads: Tensor, statistics: Tensor, group: Any = None
    ) -> Tensor:
        """The quantile centred over experts, fp32 [experts]; without any token the bias stays."""
        tokens = loads.sum() // self.top_k
        if not self.pooled:
            quantile = statistics[:, 0].double() / (tokens.clamp(min=1) * _UNIT).double()
        elif int(tokens) > 0:
            quantile = exact_quantile(gather_rows(self._own(bias), group), self.top_k).double()
        else:
            quantile = bias.double()
        return self.smooth(bias, quantile - quantile.mean(), tokens > 0)

    def _own(self, bias: Tensor) -> Tensor:
        return torch.cat([bias.new_empty(0, self.num_experts), *self.margins])

    def reset(self) -> None:
        """Forget the margins."""
        self.margins.clear()
        self.total.zero_()


def exact_quantile(margins: Tensor, top_k: int) -> Tensor:
    """[tokens, experts] -> [experts]: the smallest bias that just fails to give an expert one token more than
    its share, so that strictly fewer margins than floor(tokens * k / E) + 1 lie below it."""
    tokens, experts = margins.shape
    return margins.kthvalue(tokens * top_k // experts + 1, dim=0).values


def gather_rows(rows: Tensor, group: Any) -> Tensor:
    """The rows [n, width] of every rank of ``group``, where n may differ; every rank of it must call this."""
    if group is None or group.size() == 1:
        return rows
    counts = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(group.size())]
    dist.all_gather(counts, torch.tensor([len(rows)], device=rows.device), group=group)
    sizes = [int(count) for count in counts]
    padded = rows.new_zeros(max(sizes), rows.shape[1])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
