"""No balancing: the selection bias stays what it is."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class NoBalance(nn.Module):
    """Keeps the bias; loads are still counted by the router."""

    num_statistics = 0

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts

    def observe(self, scores: Tensor, cutoff: Tensor, valid: Tensor | None, bounds: Tensor) -> None:
        """Nothing to collect."""

    def statistics(self) -> Tensor:
        """int64 [experts, 0]."""
        return torch.empty(self.num_experts, 0, dtype=torch.int64)

    def next_bias(self, bias: Tensor, bounds: Tensor, statistics: Tensor) -> Tensor:
        """``bias`` itself."""
        return bias

    def reset(self) -> None:
        """Nothing to forget."""
