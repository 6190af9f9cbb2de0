"""Places that an order has passed: all of the latest, and fewer the further back, so that they stay few."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from k3train.data.mix import Drawing

RECENT = 256
"""Latest places that are all kept: batches are made ahead and saved behind within these."""
OLDER = 1024
"""Places before them that are kept at most. Each takes some 5 kB: 6 MB in all, however long the run."""


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
    """Places in ascending order, the first of which is never given up.

    When there are too many, every second of the older ones goes: what lay there is planned again from the
    place before it.
    """

    def __init__(self, start: Place) -> None:
        self._places = [start]
        self._every = 1

    def __len__(self) -> int:
        return len(self._places)

    @property
    def start(self) -> Place:
        """The first place."""
        return self._places[0]

    def add(self, place: Place) -> None:
        """Keep a place if it is the furthest so far."""
        if place.window <= self._places[-1].window:
            return
        self._places.append(place)
        if len(self._places) > RECENT + OLDER:
            self._thin()

    def before(self, sequence: int) -> Place:
        """The last place kept at which a sequence or one before it begins."""
        assert sequence >= self.start.first_sequence, f"sequence {sequence} lies before the mark"
        return self._places[bisect_right(self._places, sequence, key=lambda place: place.first_sequence) - 1]

    def _thin(self) -> None:
        self._every *= 2
        start, older, recent = self._places[0], self._places[1:-RECENT], self._places[-RECENT:]
        kept = [place for place in older if (place.window - start.window) % self._every == 0]
        self._places = [start, *kept, *recent]
