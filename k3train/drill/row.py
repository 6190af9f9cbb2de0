"""One line of the drill's table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from k3train.drill.bench import Bench


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What a fault came to."""

    as_expected: bool
    words: str
    detect_seconds: float | None = None
    """From the fault to the moment when something noticed; None where nothing had to."""
    lost_steps: int | None = None
    """Steps that were trained again."""
    details: str = ""
    """What ranks and supervisor printed, for a row that is not as expected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One fault of the matrix."""

    name: str
    """As typed after --faults."""
    matrix: str
    """Number in the fault matrix of docs/reliability.md."""
    fault: str
    expected: str
    play: Callable[[Bench], Seen]
