"""Quantile balancing (k3 report eq. 14 and app. D): each expert's bias from a histogram of score margins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from k3train.config import schema
from k3train.router.contract import BalanceRule
from k3train.router.smooth import Smooth, smoothed


class QuantileBalance(BalanceRule):
    """Sets expert j's bias to the k/E quantile, over the step's global batch, of cutoff_i - score_ij.

    With that bias, about k/E of all tokens would have chosen the expert. The quantile is read from a
    histogram; since histograms are integers, their sum over micro-batches and ranks, and so the bias, does
    not depend on how the batch was cut up.
    """

    histogram: Tensor
    """int32 [experts, bins]: a row sums to this rank's valid tokens of this step, fewer than 2^31."""

    def __init__(self, num_experts: int, top_k: int, settings: schema.Quantile) -> None:
        super().__init__(num_experts)
        self.top_k, self.range = top_k, settings.range
        self.num_statistics = bins = settings.bins
        self.histogram = torch.zeros(num_experts, bins, dtype=torch.int32)
        self.smooth = Smooth(num_experts, settings.window, settings.strength)

    def bounds(self, bias: Tensor) -> Tensor:
        """fp32 [..., 2]: the range that the user chose, or where every margin lies."""
        if self.range is None:
            return super().bounds(bias)
        ends = torch.tensor([-self.range, self.range], dtype=bias.dtype, device=bias.device)
        return ends.expand(*bias.shape[:-1], 2)

    def statistics(self) -> Tensor:
        """int64 [experts, bins]: 64 bits, because the sum over ranks may pass 2^31."""
        return self.histogram.long()

    def next_bias(
        self, bias: Tensor, bounds: Tensor, loads: Tensor, statistics: Tensor, group: Any = None
    ) -> Tensor:
        """The quantile of each row, interpolated inside its bin and centred over experts; fp32 [experts].

        Without any token the bias stays. Arithmetic is int64 and fp64: fp32 cannot count above 2^24.
        """
        one_layer = bias[None], bounds[None], loads[None], statistics[None]
        return self.next_biases([self], *one_layer, group)[0][0]

    @staticmethod
    @torch.no_grad()
    def next_biases(
        rules: Sequence[BalanceRule],
        biases: Tensor,
        bounds: Tensor,
        loads: Tensor,
        statistics: Tensor,
        group: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """All layers at once; their rules must have the same settings."""
        one, smooths = rules[0], []
        assert isinstance(one, QuantileBalance)
        for rule in rules:
            assert isinstance(rule, QuantileBalance)
            smooths.append(rule.smooth)
        low, high = bounds.double().unsqueeze(-1).unbind(-2)
        width = (high - low) / one.num_statistics
        below, index, target = one._locate(statistics)
        inside = statistics.gather(-1, index).squeeze(-1)
        before = (below.gather(-1, index).squeeze(-1) - inside).double()
        fraction = ((target - before) / inside.clamp(min=1).double()).clamp_(0, 1)
        quantile = low + (index.squeeze(-1).double() + fraction) * width
        seen = below[..., -1].amin(-1, keepdim=True) > 0
        new = smoothed(smooths, biases, quantile - quantile.mean(-1, keepdim=True), seen)
        return new, one._at_ends(index, below)

    @torch.no_grad()
    def saturated(self, loads: Tensor, statistics: Tensor) -> Tensor:
        """Experts whose quantile lies in the first or the last bin: those hold what lies outside as well."""
        below, index, _ = self._locate(statistics)
        return self._at_ends(index, below)

    def _at_ends(self, index: Tensor, below: Tensor) -> Tensor:
        at_end = (index == 0) | (index == self.num_statistics - 1)
        return (at_end.squeeze(-1) & (below[..., -1] > 0)).sum(-1)

    def _locate(self, statistics: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Running counts [..., experts, bins], each row's bin of the ceil(q)-th margin [..., experts, 1], and
        q = tokens * k / E, fp64 [..., experts]."""
        below = statistics.cumsum(-1)
        share = below[..., -1] * self.top_k
        rank = (share + self.num_experts - 1).div(self.num_experts, rounding_mode="floor")
        index = (below < rank.unsqueeze(-1)).sum(-1, keepdim=True).clamp_(max=self.num_statistics - 1)
        return below, index, share.double() / self.num_experts

    def reset(self) -> None:
        """Empty the histogram."""
        self.histogram.zero_()
