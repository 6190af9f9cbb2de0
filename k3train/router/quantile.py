"""Quantile balancing (k3 report eq. 14 and app. D): each expert's bias from a histogram of score margins."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class QuantileBalance(nn.Module):
    """Sets expert j's bias to the k/E quantile, over the step's global batch, of cutoff_i - score_ij.

    With that bias, about k/E of all tokens would have chosen the expert. The quantile is read from a
    histogram of ``bins`` bins between ``bounds``; since histograms are integers, their sum over micro-batches
    and ranks, and so the bias, does not depend on how the batch was cut up.
    """

    histogram: Tensor
    """int32 [experts, bins]: a row sums to this rank's valid tokens of this step, fewer than 2^31."""

    def __init__(self, num_experts: int, top_k: int, bins: int) -> None:
        super().__init__()
        if top_k >= num_experts:
            raise ValueError(
                f"model.moe.router.rule=quantile compares the {top_k} chosen experts with the next best, so "
                f"model.moe.top_k={top_k} must be less than model.moe.num_experts={num_experts}; "
                "lower top_k or set model.moe.router.rule=none"
            )
        self.num_experts = num_experts
        self.top_k = top_k
        self.num_statistics = bins
        self.register_buffer("histogram", torch.zeros(num_experts, bins, dtype=torch.int32), persistent=False)

    @torch.no_grad()
    def observe(self, scores: Tensor, cutoff: Tensor, valid: Tensor | None, bounds: Tensor) -> None:
        """Count the margins cutoff_i - score_ij, all within ``bounds`` because scores lie in (0, 1)."""
        bins = self.num_statistics
        low, high = bounds.unbind()
        margin = cutoff.unsqueeze(-1).float() - scores.float()
        # Times bins per unit: dividing by the rounded bin width would move margins on a border, such as 0.
        cell = ((margin - low) * (bins / (high - low))).floor_().long().clamp_(0, bins - 1)
        cell += bins * torch.arange(self.num_experts, device=cell.device)
        one = torch.ones_like(cell[:, 0], dtype=torch.int32) if valid is None else valid.to(torch.int32)
        # Invalid tokens add 0: dropping their rows instead would need their number on the host.
        self.histogram.view(-1).scatter_add_(0, cell.view(-1), one.repeat_interleave(self.num_experts))

    def statistics(self) -> Tensor:
        """int64 [experts, bins]: 64 bits, because the sum over ranks may pass 2^31."""
        return self.histogram.long()

    @torch.no_grad()
    def next_bias(self, bias: Tensor, bounds: Tensor, statistics: Tensor) -> Tensor:
        """The quantile of each row, interpolated inside its bin and centred over experts; fp32 [experts].

        Without any token the bias stays. Arithmetic is int64 and fp64: fp32 cannot count above 2^24.
        """
        low, high = bounds.double().unbind()
        width = (high - low) / self.num_statistics
        below = statistics.cumsum(-1)
        tokens = below[:, -1]
        share = tokens * self.top_k
        target = share.double() / self.num_experts
        rank = (share + self.num_experts - 1).div(self.num_experts, rounding_mode="floor")
        bin_index = (below < rank.unsqueeze(-1)).sum(-1, keepdim=True).clamp_(max=self.num_statistics - 1)
        inside = statistics.gather(-1, bin_index).squeeze(-1)
        before = (below.gather(-1, bin_index).squeeze(-1) - inside).double()
        fraction = ((target - before) / inside.clamp(min=1).double()).clamp_(0, 1)
        quantile = low + (bin_index.squeeze(-1).double() + fraction) * width
        return torch.where(tokens.min() > 0, quantile - quantile.mean(), bias.double()).float()

    def reset(self) -> None:
        """Empty the histogram."""
        self.histogram.zero_()
