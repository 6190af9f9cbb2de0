"""Looks at every step before the optimizer does: is it one to learn from?

The judgement is a function of the step's loss and gradient norm, which are the same on every rank, and of
``GuardState``, which a checkpoint keeps: all ranks decide alike, and a restarted run as an uninterrupted one.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from k3train.config.schema import Guards, OnNonFinite, OnSpike
from k3train.train.left_out import LeftOut

MIN_HISTORY = 8
"""Steps of a stage before anything is called a spike."""
_DEVIATIONS = 1.4826
"""Standard deviations of a normal distribution in one median absolute deviation."""
_LEAST_LOSS_SPREAD = 0.02
"""Smallest spread of losses, relative to their median: a flat curve has no spread of its own."""
_LEAST_NORM_SPREAD = 0.15
"""Smallest spread of the logarithm of gradient norms."""


class Action(Enum):
    """What becomes of a step."""

    update = "update"
    skip = "skip"
    stop = "stop"
    rollback = "rollback"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What is wrong with a step, and what is done about it."""

    kind: str
    """nonfinite, spike, or replay: nothing but that the step repeats differently."""
    quantity: str
    """loss, gradient norm, or step for a replay."""
    value: float
    usual: float | None = None
    """Median of the window; None for nonfinite."""
    score: float | None = None
    """Robust standard deviations above it; None for nonfinite."""
    action: Action

    def __str__(self) -> str:
        if self.score is None:
            return f"{self.quantity} is {self.value}"
        how = f"{self.score:.0f} deviations above the usual {self.usual:.4g}"
        return f"{self.quantity} is {self.value:.4g}, {how}"


@dataclass(kw_only=True, slots=True)
class GuardState:
    """What the judgement of the next step depends on besides its loss and norm; kept in checkpoints."""

    stage: str = ""
    """The stage that the windows belong to: another context length has another loss."""
    losses: list[float] = field(default_factory=list[float])
    """Losses of the latest steps that updated, oldest first."""
    norms: list[float] = field(default_factory=list[float])
    """Their gradient norms before clipping."""
    skipped: int = 0
    """Steps of the run that updated nothing."""
    skipped_in_a_row: int = 0
    """Bad steps since the last good one."""
    left_out: list[LeftOut] = field(default_factory=list[LeftOut])
    """Steps that are not trained when they come, or come again."""

    def to_json(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> GuardState:
        """Read back what ``to_json`` wrote. Raises TypeError for an unknown item."""
        return cls(**{**values, "left_out": [LeftOut(**entry) for entry in values["left_out"]]})

    def why_left_out(self, step: int) -> str | None:
        """Why ``step`` is not trained; None when it is."""
        return next((entry.why for entry in self.left_out if entry.first <= step <= entry.last), None)

    def enter_stage(self, name: str) -> None:
        """Start new windows when the stage is another one."""
        if self.stage != name:
            self.stage, self.losses, self.norms = name, [], []

    def updated(self, loss: float, norm: float, window: int) -> None:
        """Remember a step that the optimizer took; ``window`` steps are kept."""
        self.skipped_in_a_row = 0
        self.losses = [*self.losses, loss][-window:]
        self.norms = [*self.norms, norm][-window:]

    def not_updated(self, *, planned: bool) -> None:
        """Count a step without update; ``planned`` ones were left out by a rollback and break no rule."""
        self.skipped += 1
        self.skipped_in_a_row += not planned


def judge(settings: Guards, state: GuardState, loss: float, norm: float) -> Finding | None:
    """What is wrong with a step of this loss and gradient norm; None when it is as it should be."""
    for quantity, value in (("loss", loss), ("gradient norm", norm)):
        if not math.isfinite(value):
            action = Action.stop if settings.nonfinite is OnNonFinite.stop else Action.skip
            return Finding(kind="nonfinite", quantity=quantity, value=value, action=action)
    if settings.spike is OnSpike.off or len(state.losses) < MIN_HISTORY:
        return None
    action = Action.update if settings.spike is OnSpike.warn else Action(settings.spike.value)
    loss_score = _score(loss, state.losses, _LEAST_LOSS_SPREAD * abs(statistics.median(state.losses)))
    # Norms spread by factors, not by amounts.
    norm_score = _score(_log(norm), [_log(each) for each in state.norms], _LEAST_NORM_SPREAD)
    for quantity, value, score, window in (
        ("loss", loss, loss_score, state.losses),
        ("gradient norm", norm, norm_score, state.norms),
    ):
        if score > settings.spike_score:
            usual = statistics.median(window)
            return Finding(
                kind="spike", quantity=quantity, value=value, usual=usual, score=score, action=action
            )
    return None


_LEAVES_OUT = (Action.skip, Action.rollback)


def overruled(finding: Finding | None, again: Finding | None, loss: float) -> Finding:
    """The finding on a step of this loss that came out differently when it was computed again.

    ``again`` is the finding on how it came out last. It is never an update: the run stops where it would have
    gone on from such a step. Nor is a batch left out that only the hardware has made look bad: it must be so
    both times.
    """
    if finding is None:
        return Finding(kind="replay", quantity="step", value=loss, action=Action.stop)
    bad_again = again is not None and again.action in _LEAVES_OUT
    return finding if bad_again and finding.action in _LEAVES_OUT else replace(finding, action=Action.stop)


def _score(value: float, window: list[float], least_spread: float) -> float:
    """How many robust standard deviations ``value`` lies above the window's median."""
    median = statistics.median(window)
    spread = _DEVIATIONS * statistics.median(abs(each - median) for each in window)
    return (value - median) / max(spread, least_spread, 1e-12)


def _log(norm: float) -> float:
    return math.log(max(norm, 1e-30))
