"""Places that an order has passed: few of them, however long it is."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass

from k3train.data.mix import Drawing

LATEST = 256
"""Places made last that are kept: batches are made ahead and saved behind within these."""
SPREAD = 1024
"""Places kept at most over all of the stage. Each takes some 5 kB: 6 MB in all."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a window begins."""

    window: int
    """Its number in the stage."""
    first_sequence: int
    """The number of its first sequence in the stage."""
    drawing: Drawing
    """How far the stage had drawn."""


class Trail:
    """Places of a stage: those made last, wherever they lie, and some spread evenly over all that was ever
    passed. What lies between is planned again from the place before it.
    """

    def __init__(self, start: Place) -> None:
        self._spread = [start]
        self._every = 1
        self._latest: deque[Place] = deque(maxlen=LATEST)

    def __len__(self) -> int:
        return len(self._spread) + len(self._latest)

    def add(self, place: Place) -> None:
        """Keep a place that has just been made, from the one before it."""
        self._latest.append(place)
        if place.window > self._spread[-1].window and self._is_due(place):
            self._spread.append(place)
        if len(self._spread) > SPREAD:
            self._every *= 2
            self._spread = [each for each in self._spread if self._is_due(each)]

    def before(self, sequence: int) -> Place:
        """The last place kept at which a sequence or one before it begins."""
        start = self._spread[0]
        assert sequence >= start.first_sequence, f"sequence {sequence} lies before the mark"
        nearest = bisect_right(self._spread, sequence, key=lambda place: place.first_sequence) - 1
        near = [place for place in self._latest if place.first_sequence <= sequence]
        return max([self._spread[nearest], *near], key=lambda place: place.window)

    def _is_due(self, place: Place) -> bool:
        return (place.window - self._spread[0].window) % self._every == 0
