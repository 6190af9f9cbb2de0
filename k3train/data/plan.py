"""Which pieces of which documents make up each sequence of a stage: a pure function that every rank computes.

Nothing here knows ranks, micro-batches or how long the stage lasts. Documents are drawn in windows; a window
is packed and shuffled on its own, so training longer never changes what came before.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from threading import RLock
from typing import Any

import numpy as np

from k3train.data.batch import Piece
from k3train.data.mix import Drawing, Pieces, Position, Stream, chain, draw_window, no_pieces
from k3train.data.order import key_of, keyed_hash, shuffled
from k3train.data.pack import best_fit
from k3train.data.trail import Place, Trail

MIN_WINDOW_SEQUENCES = 64
"""A window holds at least this many sequences, or best fit has too little to choose from."""
FORMAT = 2
"""Raised when the same inputs give another order."""


@dataclass(frozen=True, slots=True)
class Window:
    """One packed window: its pieces sorted by sequence, and the place within each source they came from."""

    source: np.ndarray
    """int64 [pieces]: index into the stage's sources."""
    pieces: Pieces
    rank: np.ndarray
    """int64 [pieces]: place in the order of drawing."""
    borders: np.ndarray
    """int64 [sequences + 1]: first piece of each sequence."""

    def __len__(self) -> int:
        return len(self.borders) - 1


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a window of a stage begins; an order of the same inputs goes on from it and plans none before."""

    start: dict[str, Position]
    """Where each source stood when the stage began."""
    window: int
    """The window's number in the stage."""
    first_sequence: int
    """The number of its first sequence in the stage."""
    drawing: Drawing
    """How far the stage had drawn."""

    def values(self) -> dict[str, Any]:
        """The mark as plain values."""
        return {
            "start": {name: at.values() for name, at in self.start.items()},
            "window": self.window,
            "first_sequence": self.first_sequence,
            "drawing": self.drawing.values(),
        }

    @staticmethod
    def of(values: dict[str, Any]) -> Mark:
        """The mark that ``values`` came from. Raises KeyError, TypeError or ValueError for others."""
        start = {name: Position.of(at) for name, at in values["start"].items()}
        return Mark(start, values["window"], values["first_sequence"], Drawing.of(values["drawing"]))


@dataclass(frozen=True, slots=True)
class _Planned:
    """A window, where it begins and where the next one does."""

    start: Place
    window: Window
    after: Place


class StageOrder:
    """The sequences of one stage. Windows are made when first asked for; only where they begin is kept, of
    long stages not for all."""

    def __init__(
        self,
        *,
        streams: dict[str, Stream],
        weights: dict[str, float],
        context_tokens: int,
        pack_window_tokens: int,
        seed: int,
        start: dict[str, Position],
    ) -> None:
        """Weights name some of the streams and need not add up to 1; ``start`` names every stream."""
        total = sum(weights.values())
        self.weights = {name: weight / total for name, weight in sorted(weights.items()) if weight > 0}
        self.context_tokens = context_tokens
        self._streams = streams
        self._names = list(self.weights)
        self._window_tokens = max(MIN_WINDOW_SEQUENCES * context_tokens, pack_window_tokens)
        self._seed = seed
        self._start = start
        self._trail = Trail(Place(0, 0, Drawing(0.0, dict.fromkeys(self._names, 0), start)))
        self._cache: _Planned | None = None
        self._lock = RLock()

    def inputs(self) -> dict[str, Any]:
        """All that decides the sequences of this stage, as plain values: compare two to name a change."""
        sources = {}
        for name in self._names:
            at = self._start[name]
            returned = hashlib.sha256(
                b"".join(a.tobytes() for a in (at.returned.document, at.returned.start, at.returned.length))
            ).hexdigest()
            sources[name] = {
                **self._streams[name].inputs(),
                "weight": self.weights[name],
                "start": [at.epoch, at.offset, returned[:16]],
            }
        return {
            "format": FORMAT,
            "seed": self._seed,
            "context_tokens": self.context_tokens,
            "window_tokens": self._window_tokens,
            "sources": sources,
        }

    def fingerprint(self) -> str:
        """sha256 of the inputs: ranks compare it at the start, a checkpoint keeps it."""
        return hashlib.sha256(json.dumps(self.inputs(), sort_keys=True).encode()).hexdigest()

    def mark(self, sequences: int) -> Mark:
        """Where the window begins that holds the last of the first so many sequences."""
        with self._lock:
            place = self._planned(max(sequences - 1, 0)).start
        return Mark(self._start, place.window, place.first_sequence, place.drawing)

    def go_to(self, mark: Mark) -> None:
        """Skip to a mark of an order with the same inputs; earlier sequences are then out of reach."""
        self._trail = Trail(Place(mark.window, mark.first_sequence, mark.drawing))
        self._cache = None

    def sequence(self, number: int) -> list[Piece]:
        """The pieces of a sequence of this stage, counted from 0. Raises Exhausted where text runs out."""
        with self._lock:
            planned = self._planned(number)
        window, row = planned.window, number - planned.start.first_sequence
        at = slice(int(window.borders[row]), int(window.borders[row + 1]))
        pieces = window.pieces[at]
        names = [self._names[i] for i in window.source[at].tolist()]
        columns = (pieces.document.tolist(), pieces.start.tolist(), pieces.length.tolist())
        return [Piece(*fields) for fields in zip(names, *columns, strict=True)]

    def consumed(self, sequences: int) -> dict[str, int]:
        """Tokens of each source within the first so many sequences, padding left out."""
        at, unused = self._cut(sequences)
        return {name: at.drawn[name] - unused[name].tokens for name in self._names}

    def end(self, sequences: int) -> dict[str, Position]:
        """Where streams stand after the first so many sequences; what was drawn beyond them goes back."""
        at, unused = self._cut(sequences)
        result = dict(at.positions)
        for name, pieces in unused.items():
            if len(pieces):
                place = at.positions[name]
                result[name] = Position(place.epoch, place.offset, chain(pieces, place.returned).merged())
        return result

    def epochs(self, name: str, position: Position) -> float:
        """Passes over a source that led to a position."""
        done = position.offset - position.returned.tokens
        return position.epoch + done / self._streams[name].epoch_tokens

    def _cut(self, sequences: int) -> tuple[Drawing, dict[str, Pieces]]:
        """The drawing that covers the first so many sequences, and which of its pieces they do not use."""
        if sequences == 0:
            nothing = Drawing(0.0, dict.fromkeys(self._names, 0), self._start)
            return nothing, {name: no_pieces() for name in self._names}
        with self._lock:
            planned = self._planned(sequences - 1)
        window = planned.window
        used = int(window.borders[sequences - planned.start.first_sequence])
        late = np.zeros(len(window.rank), bool)
        late[used:] = True
        unused = {}
        for i, name in enumerate(self._names):
            which = np.flatnonzero(late & (window.source == i))
            unused[name] = window.pieces[which[np.argsort(window.rank[which])]]
        return planned.after.drawing, unused

    def _planned(self, number: int) -> _Planned:
        """The window of a sequence, after making as many as it takes from the last place kept before it."""
        made = self._cache
        if made and made.start.first_sequence <= number < made.after.first_sequence:
            return made
        place = self._trail.before(number)
        while place.first_sequence <= number:
            window, drawing = self._make(place)
            after = Place(place.window + 1, place.first_sequence + len(window), drawing)
            self._trail.add(after)
            self._cache = made = _Planned(place, window, after)
            place = after
        assert made is not None
        return made

    def _make(self, begin: Place) -> tuple[Window, Drawing]:
        """Draw, pack and shuffle the window that begins there; and how far it has drawn."""
        drawn, after = draw_window(
            self._streams,
            self.weights,
            begin.drawing,
            window_tokens=self._window_tokens,
            context_tokens=self.context_tokens,
        )
        pieces = chain(*(drawn[name] for name in self._names))
        source = np.repeat(np.arange(len(self._names)), [len(drawn[name]) for name in self._names])
        if not len(pieces):
            return Window(source, pieces, source, np.zeros(1, np.int64)), after
        packed, count = best_fit(pieces.length, self.context_tokens)
        # Best fit puts full sequences first and long pieces first within each; both orders are shuffled away.
        key = key_of("window", self._seed, self.context_tokens, begin.window)
        share = np.zeros((count, len(self._names)), np.int64)
        np.add.at(share, (packed, source), pieces.length)
        # What did not fill a sequence goes last: a stage that ends within the window gives it back instead.
        place = _spread(share.argmax(axis=1), key, last=int(share.sum(axis=1).argmin()))
        within = keyed_hash(np.arange(len(pieces)), key)
        order = np.lexsort((within, place[packed]))
        borders = np.searchsorted(place[packed][order], np.arange(count + 1))
        return Window(source[order], pieces[order], order, borders), after


def changed(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """Names of the inputs of an order that differ, as dotted paths."""
    names = []
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            names += changed(old, new, f"{prefix}{key}.")
        elif old != new:
            names.append(f"{prefix}{key}")
    return names


def _spread(group: np.ndarray, key: int, *, last: int) -> np.ndarray:
    """Places int64 [n] in a shuffle in which every prefix has each group's share, up to about one thing."""
    at = np.empty(len(group))
    for number in np.unique(group):
        members = shuffled(np.flatnonzero(group == number), key)
        jitter = keyed_hash(members, key_of("spread", key)) / 2.0**64
        at[members] = (np.arange(len(members)) + jitter) / len(members)
    at[last] = 1
    place = np.empty(len(group), np.int64)
    place[np.argsort(at, kind="stable")] = np.arange(len(group))
    return place
