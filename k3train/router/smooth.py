"""Averages a rule's solutions over steps and moves the bias toward them."""

from __future__ import annotations

from collections.abc import Sequence

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

    def forward(self, bias: Tensor, solution: Tensor, seen: Tensor) -> Tensor:
        """The next bias, fp32 [experts], from ``solution``, fp64 [experts]; where ``seen``, a bool scalar, is
        False nothing changes."""
        return smoothed([self], bias[None], solution[None], seen.view(1, 1))[0]


@torch.no_grad()
def smoothed(layers: Sequence[Smooth], biases: Tensor, solutions: Tensor, seen: Tensor) -> Tensor:
    """The next biases, fp32 [layers, experts], of layers that have the same settings.

    ``solutions`` fp64 [layers, experts]; where ``seen``, bool [layers, 1], is False nothing changes.
    """
    one, old = layers[0], biases.double()
    if one.window > 1:
        counts, averages = [each.averaged for each in layers], [each.average for each in layers]
        count = (torch.stack(counts) + seen).clamp_(max=one.window)
        before = torch.stack(averages).double()
        solutions = before + (solutions - before) / count.clamp(min=1)
        torch._foreach_copy_(counts, count.unbind())
        torch._foreach_copy_(averages, torch.where(seen, solutions, before).float().unbind())
    if one.strength != 1:
        solutions = old + one.strength * (solutions - old)
    return torch.where(seen, solutions, old).float()
