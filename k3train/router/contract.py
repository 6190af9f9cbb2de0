"""What a routing rule is, and which one a run asked for."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from k3train.config import schema
from k3train.router.none import NoBalance
from k3train.router.quantile import QuantileBalance


class BalanceRule(Protocol):
    """How the selection bias of one router is found from what its tokens did in one optimizer step.

    A rule is an ``nn.Module`` that holds only the step's statistics, in non-persistent buffers. The bias
    itself belongs to the router, so that a checkpoint of one rule continues under another.
    """

    num_statistics: int
    """Integers per expert that the rule needs summed over all ranks."""

    def observe(self, scores: Tensor, cutoff: Tensor, valid: Tensor | None, bounds: Tensor) -> None:
        """Add one micro-batch: scores [n, experts], the (k+1)-th biased score [n], bool mask [n] or None."""
        ...

    def statistics(self) -> Tensor:
        """This rank's int64 [experts, num_statistics] since the last ``reset``."""
        ...

    def next_bias(self, bias: Tensor, bounds: Tensor, statistics: Tensor) -> Tensor:
        """Bias of the next step, fp32 [experts], from ``statistics`` summed over every rank's tokens."""
        ...

    def reset(self) -> None:
        """Forget the step's statistics."""
        ...


def make_rule(router: schema.Router, num_experts: int, top_k: int) -> NoBalance | QuantileBalance:
    """The rule that ``model.moe.router.rule`` names."""
    match router.rule:
        case schema.RouterRule.quantile:
            return QuantileBalance(num_experts, top_k, router.bins)
        case schema.RouterRule.none:
            return NoBalance(num_experts)
