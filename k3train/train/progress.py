"""How far a run has come: the whole of its state besides weights and optimizer."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from k3train.optim.schedule import Bends
from k3train.train.guards import GuardState


@dataclass(kw_only=True, slots=True)
class Progress:
    """Position of a run. Its clock is ``tokens``; data order and learning rate are functions of it."""

    step: int = 0
    """Steps taken, over all stages; those that updated nothing included."""
    tokens: int = 0
    """Tokens trained on, padding included: a sum of whole global batches."""
    bends: Bends = ()
    """Where the run's length was changed under way; the learning rate goes on from there."""
    guards: GuardState = field(default_factory=GuardState)

    def to_json(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Progress:
        """Read back what ``to_json`` wrote. Raises KeyError when an item is missing."""
        guards = GuardState.from_json(values["guards"])
        bends = tuple((tokens, reached) for tokens, reached in values.get("bends", ()))
        return cls(step=values["step"], tokens=values["tokens"], bends=bends, guards=guards)


def is_due(step: int, every: int) -> bool:
    """Whether something happens after ``step`` that happens every so many steps, or never for 0."""
    return every > 0 and step % every == 0
