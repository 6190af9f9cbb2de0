"""What a routing rule is: one small class, of which every method may be left as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class BalanceRule(nn.Module):
    """How one router is kept balanced, from what its tokens did in one optimizer step.

    The bias belongs to the router, so that a checkpoint of one rule continues under another; what a rule
    itself carries from step to step is in persistent buffers, which such a checkpoint need not have. The
    step's statistics are in non-persistent buffers.
    """

    num_statistics: int = 0
    """Integers per expert that the rule needs summed over all ranks."""
    histogram: Tensor | None
    """int32 [experts, bins] into which ``select.count_margins`` counts this rank's margins, or None."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.register_buffer("histogram", None, persistent=False)

    def bounds(self, bias: Tensor) -> Tensor:
        """fp32 [..., 2] from bias [..., experts]: ends of the histogram; with scores in (0, 1) every margin
        lies between these."""
        return torch.stack((bias.amin(-1) - 1, bias.amax(-1) + 1), dim=-1)

    def observe(self, logits: Tensor, cutoff: Tensor, valid: Tensor | None) -> None:
        """See one micro-batch: logits [n, experts], (k+1)-th biased score [n], bool mask [n] or None."""

    def loss(self, logits: Tensor, experts: Tensor, valid: Tensor | None) -> Tensor | None:
        """Auxiliary loss summed over this rank's tokens of one micro-batch, or None; experts [n, k]."""

    def statistics(self) -> Tensor:
        """This rank's int64 [experts, num_statistics] since the last ``reset``."""
        return torch.empty(self.num_experts, 0, dtype=torch.int64)

    def next_bias(
        self, bias: Tensor, bounds: Tensor, loads: Tensor, statistics: Tensor, group: Any = None
    ) -> Tensor:
        """Bias of the next step, fp32 [experts].

        ``loads``, int64 [experts], and ``statistics`` are summed over every rank's tokens. ``group`` holds
        those ranks; every rank of it calls this.
        """
        return bias

    def saturated(self, loads: Tensor, statistics: Tensor) -> Tensor:
        """Experts whose solution lies at an end of the histogram, which may have cut it off; a scalar."""
        return loads.new_zeros(())

    @staticmethod
    def next_biases(
        rules: Sequence[BalanceRule],
        biases: Tensor,
        bounds: Tensor,
        loads: Tensor,
        statistics: Tensor,
        group: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """``next_bias``, fp32 [layers, experts], and ``saturated``, [layers], of the rules of several layers.

        Arguments are theirs with a first dimension of layers. A rule whose arithmetic takes many small
        kernels does it for all layers at once.
        """
        new, saturated = [], []
        each = zip(rules, biases, bounds, loads, statistics, strict=True)
        for rule, bias, ends, load, numbers in each:
            new.append(rule.next_bias(bias, ends, load, numbers, group))
            saturated.append(rule.saturated(load, numbers))
        return torch.stack(new), torch.stack(saturated)

    def reset(self) -> None:
        """Forget the step's statistics."""
