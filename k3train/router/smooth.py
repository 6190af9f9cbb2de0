"""Averages a rule's solutions over steps and moves the bias toward them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Smooth(nn.Module):
    """Exponential moving average over about ``window`` steps, then a move by ``strength`` of the way.

    k3 report app. D, last sentence, proposes the average. Until ``window`` steps have been seen it is their
    plain mean, so that it does not lean toward its start.
    """

    average: Tensor
    """fp32 [experts]; in checkpoints, with a window of several steps."""
    averaged: Tensor
    """int64 [1]: steps in the average, at most the window."""

    def __init__(self, num_experts: int, window: int, strength: float) -> None:
        super().__init__()
        self.window, self.strength = window, strength
        if window > 1:
            self.register_buffer("average", torch.zeros(num_experts, dtype=torch.float32))
            self.register_buffer("averaged", torch.zeros(1, dtype=torch.int64))

    @torch.no_grad()
    def forward(self, bias: Tensor, solution: Tensor, seen: Tensor) -> Tensor:
        """The next bias, fp32 [experts], from ``solution``, fp64 [experts]; where ``seen``, a bool scalar, is
        False nothing changes."""
        old = bias.double()
        if self.window > 1:
            self.averaged.copy_((self.averaged + seen).clamp_(max=self.window))
            average = self.average.double()
            average = average + (solution - average) / self.averaged.clamp(min=1)
            self.average.copy_(torch.where(seen, average, self.average.double()))
            solution = average
        if self.strength != 1:
            solution = old + self.strength * (solution - old)
        return torch.where(seen, solution, old).float()
