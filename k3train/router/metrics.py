"""Numbers that say how balanced a step was."""

from __future__ import annotations

import math

import torch
from torch import Tensor

COLUMNS = (
    "tokens",
    "max_violation",
    "load_cv",
    "dead_experts",
    "causal_lag",
    "bias_range",
    "bias_drift",
    "saturated_experts",
)
"""Names of what ``balance_table`` measures, in its order."""
AUDIT_COLUMNS = ("exact_error", "own_violation")
"""Names of what an ``Audit`` adds on the steps that are looked at more closely."""


def balance_table(loads: Tensor, old: Tensor, new: Tensor, saturated: Tensor, top_k: int) -> Tensor:
    """fp64 [layers, len(COLUMNS)] from loads int64, old and new biases [layers, experts], saturated [layers].

    ``tokens`` that were counted; ``max_violation``, the largest load over the mean load less 1; ``load_cv``,
    standard deviation over mean of the loads; ``dead_experts``, those without a token; ``causal_lag``, the
    mean absolute violation beyond sqrt(2 / (pi * mean load)), which independent tokens have under a perfect
    bias: what the bias, found from the batch before, got wrong on this one; ``bias_range``, largest less
    smallest new bias; ``bias_drift``, largest change of a bias; ``saturated_experts``, those whose solution
    lies at an end of the histogram.
    """
    exact = loads.double()
    mean = exact.mean(-1)
    # A step of padding alone has no balance to speak of: 0, not a division by 0.
    over_mean = torch.where(mean > 0, 1 / mean, 0)
    floor = (2 / math.pi * over_mean).sqrt()
    old, new = old.double(), new.double()
    columns = {
        "tokens": exact.sum(-1) / top_k,
        "max_violation": (exact.amax(-1) - mean) * over_mean,
        "load_cv": exact.std(-1, correction=0) * over_mean,
        "dead_experts": (loads == 0).sum(-1).double(),
        "causal_lag": ((exact - mean.unsqueeze(-1)).abs().mean(-1) * over_mean - floor).clamp(min=0),
        "bias_range": new.amax(-1) - new.amin(-1),
        "bias_drift": (new - old).abs().amax(-1),
        "saturated_experts": saturated.double(),
    }
    return torch.stack([columns[name] for name in COLUMNS], dim=-1)
