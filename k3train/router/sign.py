"""Auxiliary-loss-free balancing: a fixed step against each expert's error (arXiv:2408.15664, algorithm 1)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3train.router.contract import BalanceRule


class SignBalance(BalanceRule):
    """b_j += rate * sign(mean load - load_j), from the loads of the step's global batch.

    This is signed gradient descent on the dual problem that quantile balancing solves by coordinates.
    """

    def __init__(self, num_experts: int, rate: float) -> None:
        super().__init__(num_experts)
        self.rate = rate

    @torch.no_grad()
    def next_bias(
        self, bias: Tensor, bounds: Tensor, loads: Tensor, statistics: Tensor, group: Any = None
    ) -> Tensor:
        """One step; without any token all errors are 0 and the bias stays."""
        return bias + self.rate * torch.sign(loads.sum() - self.num_experts * loads)
