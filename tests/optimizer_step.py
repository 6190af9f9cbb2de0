"""One optimizer step as training takes it when its guards find nothing else to say."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from k3train.optim.build import apply_gradients, gradient_norm


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """What one optimizer step did; the same on every rank."""

    grad_norm: float
    """Global L2 norm of the gradient before clipping; not finite when the step was skipped."""
    skipped: bool
    """The norm was not finite: parameters and moments are as before."""


def optimizer_step(optimizer: Any) -> StepOutcome:
    """``gradient_norm`` and, when it is finite, ``apply_gradients``; otherwise no rank updates anything.

    Every rank of the world must call this.
    """
    norm = gradient_norm(optimizer)
    if not math.isfinite(norm):
        return StepOutcome(grad_norm=norm, skipped=True)
    apply_gradients(optimizer, norm)
    return StepOutcome(grad_norm=norm, skipped=False)
