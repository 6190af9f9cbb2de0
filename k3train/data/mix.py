"""Draw documents from weighted sources, each in its own shuffled order, and never more often than allowed."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from k3train.config.problems import BadInput
from k3train.data.order import key_of, shuffled


@dataclass(frozen=True, slots=True)
class Pieces:
    """Stretches of documents of one source, in the order they are drawn; three int64 arrays of one length."""

    document: np.ndarray
    start: np.ndarray
    length: np.ndarray

    def __len__(self) -> int:
        return len(self.document)

    def __getitem__(self, which: slice | np.ndarray) -> Pieces:
        return Pieces(self.document[which], self.start[which], self.length[which])

    @property
    def tokens(self) -> int:
        """Their summed length."""
        return int(self.length.sum())

    def cut(self, longest: int) -> Pieces:
        """The same tokens in pieces of at most ``longest`` tokens."""
        parts = -(-self.length // longest)
        number = np.arange(int(parts.sum())) - np.repeat(np.cumsum(parts) - parts, parts)
        skip = number * longest
        length = np.minimum(np.repeat(self.length, parts) - skip, longest)
        return Pieces(np.repeat(self.document, parts), np.repeat(self.start, parts) + skip, length)

    def first(self, tokens: int) -> Pieces:
        """The first so many tokens; there must be as many."""
        before = np.cumsum(self.length) - self.length
        kept = self[: int(np.searchsorted(before, tokens, side="left"))]
        length = kept.length.copy()
        length[-1] = tokens - int(before[len(kept) - 1])
        return Pieces(kept.document, kept.start, length)

    def merged(self) -> Pieces:
        """The same tokens with every piece that continues the one before it joined to it."""
        if not len(self):
            return self
        ends = self.start + self.length
        joins = (self.document[1:] == self.document[:-1]) & (self.start[1:] == ends[:-1])
        first = np.concatenate([[0], np.flatnonzero(~joins) + 1])
        return Pieces(self.document[first], self.start[first], np.add.reduceat(self.length, first))


def no_pieces() -> Pieces:
    """Pieces of nothing."""
    return Pieces(*(np.empty(0, np.int64) for _ in range(3)))


def chain(*parts: Pieces) -> Pieces:
    """All pieces, one after the other."""
    return Pieces(
        np.concatenate([p.document for p in parts]),
        np.concatenate([p.start for p in parts]),
        np.concatenate([p.length for p in parts]),
    )


@dataclass(frozen=True, slots=True)
class Position:
    """How far one source has been drawn."""

    epoch: int = 0
    offset: int = 0
    """Tokens of the epoch's order that were drawn."""
    returned: Pieces = field(default_factory=no_pieces)
    """Pieces of the same epoch that were drawn and not trained on; they come first when drawing goes on."""

    def values(self) -> list[object]:
        """The position as plain values."""
        back = self.returned
        return [self.epoch, self.offset, back.document.tolist(), back.start.tolist(), back.length.tolist()]

    @staticmethod
    def of(values: list[Any]) -> Position:
        """The position that ``values`` came from."""
        return Position(values[0], values[1], Pieces(*(np.array(column, np.int64) for column in values[2:])))


class Stream:
    """The documents of one source in the order of each epoch; all follows from corpus, settings and seed."""

    def __init__(
        self,
        *,
        name: str,
        corpus_fingerprint: str,
        lengths: np.ndarray,
        min_document_tokens: int,
        max_epochs: float,
        seed: int,
    ) -> None:
        self.name, self.max_epochs = name, max_epochs
        self.corpus_fingerprint = corpus_fingerprint
        self._inputs = {"corpus": corpus_fingerprint, "min_document_tokens": min_document_tokens}
        self._key = (seed, name, corpus_fingerprint)
        self._lengths = lengths
        self._eligible = np.flatnonzero(lengths >= max(min_document_tokens, 1))
        self.num_documents = len(self._eligible)
        """Documents that are long enough."""
        self.epoch_tokens = int(lengths[self._eligible].sum())
        """Tokens of one epoch."""
        self._order = lru_cache(maxsize=2)(self._make_order)

    def inputs(self) -> dict[str, Any]:
        """What decides the order of documents, as plain values.

        A whole max_epochs only says how far one may go; a broken one also moves the end of the last epoch.
        """
        return {**self._inputs, "broken_epoch": self.max_epochs if self.max_epochs % 1 else None}

    def _make_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Documents of an epoch in order, and where each begins: int64 [documents] and [documents + 1]."""
        documents = shuffled(self._eligible, key_of("documents", *self._key, epoch))
        return documents, np.concatenate([[0], np.cumsum(self._lengths[documents])])

    def _limit(self, epoch: int) -> int:
        """Tokens of an epoch that may be drawn: all, or the whole documents within the last, broken epoch."""
        share = self.max_epochs - epoch
        if share >= 1:
            return self.epoch_tokens
        if share <= 0:
            return 0
        borders = self._order(epoch)[1]
        return int(borders[np.searchsorted(borders, share * self.epoch_tokens, side="right") - 1])

    @property
    def allowed_tokens(self) -> int:
        """Tokens that max_epochs allows, over the whole run."""
        whole = int(self.max_epochs)
        return whole * self.epoch_tokens + self._limit(whole)

    def settled(self, position: Position) -> Position:
        """The same place, as the start of the next epoch when this one is finished and one may follow."""
        finished = position.offset >= self._limit(position.epoch) and not len(position.returned)
        if finished and self._limit(position.epoch + 1) > 0:
            return Position(position.epoch + 1)
        return position

    def remaining(self, position: Position) -> int:
        """Tokens until the epoch ends; 0 at a settled position means that max_epochs is used up."""
        return position.returned.tokens + self._limit(position.epoch) - position.offset

    def take(self, position: Position, tokens: float, context_tokens: int) -> tuple[Pieces, Position]:
        """Pieces, cut to the context, until ``tokens`` are reached or the epoch ends; and the place after.

        The last piece may go beyond ``tokens``: a piece is drawn while fewer have been drawn before it.
        """
        if tokens <= 0:
            return no_pieces(), position
        returned = position.returned.tokens
        fresh = self._fresh(position, tokens - returned)
        # A document that was given back in part and goes on in the stream is one stretch again.
        pieces = chain(position.returned, fresh).merged().cut(context_tokens)
        before = np.cumsum(pieces.length) - pieces.length
        drawn = pieces[: int(np.searchsorted(before, tokens, side="left"))]
        beyond = drawn.tokens - returned
        if beyond >= 0:
            return drawn, Position(position.epoch, position.offset + beyond)
        return drawn, Position(position.epoch, position.offset, pieces[len(drawn) :].first(-beyond).merged())

    def _fresh(self, position: Position, tokens: float) -> Pieces:
        """Documents from the offset on that begin within ``tokens``; of the first, what was not drawn."""
        limit = self._limit(position.epoch)
        if tokens <= 0 or position.offset >= limit:
            return no_pieces()
        documents, borders = self._order(position.epoch)
        first = int(np.searchsorted(borders, position.offset, side="right")) - 1
        stop = int(np.searchsorted(borders, min(position.offset + tokens, limit), side="left"))
        document = documents[first:stop]
        start = np.zeros(len(document), np.int64)
        start[0] = position.offset - int(borders[first])
        return Pieces(document, start, self._lengths[document] - start)


@dataclass(frozen=True, slots=True)
class Drawing:
    """How far a stage has drawn from all its sources."""

    target: float
    """Tokens that all sources together should have given in this stage."""
    drawn: dict[str, int]
    """Tokens that each has given in this stage."""
    positions: dict[str, Position]
    """Where each source stands."""

    def values(self) -> list[object]:
        """The drawing as plain values."""
        return [self.target, self.drawn, {name: at.values() for name, at in self.positions.items()}]

    @staticmethod
    def of(values: list[Any]) -> Drawing:
        """The drawing that ``values`` came from."""
        return Drawing(values[0], values[1], {name: Position.of(at) for name, at in values[2].items()})


class Exhausted(BadInput):
    """A source has no text left within its max_epochs; ``name`` says which."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"data.sources.{name} has no text left within its max_epochs: raise "
            f"data.sources.{name}.max_epochs, give {name} less weight or train on fewer tokens"
        )


def draw_window(
    streams: dict[str, Stream],
    weights: dict[str, float],
    at: Drawing,
    *,
    window_tokens: int,
    context_tokens: int,
) -> tuple[dict[str, Pieces], Drawing]:
    """The next window: pieces of each source, and the state after them. Raises Exhausted.

    Each source is drawn up to its weight's share of all tokens drawn, so its error never exceeds one sequence
    however long the stage is. A window ends early where an epoch of a source ends: no window holds a document
    twice, and no window needs text that max_epochs forbids. A source that has given all that it may is
    exhausted when the others have come as far: its end may have been drawn ahead of its share. A window
    before that can be empty.
    """
    positions = {name: streams[name].settled(at.positions[name]) for name in weights}
    remaining = {name: streams[name].remaining(positions[name]) for name in weights}
    reach = {name: (at.drawn[name] + remaining[name]) / weight for name, weight in weights.items()}
    for name, left in remaining.items():
        if left == 0 and reach[name] <= at.target:
            raise Exhausted(name)
    target = min(at.target + window_tokens, *reach.values())
    window: dict[str, Pieces] = {}
    after, drawn = dict(at.positions), dict(at.drawn)
    for name, weight in weights.items():
        wanted = weight * target - at.drawn[name]
        # What would be left of the epoch must be worth a sequence, or it would make one of mostly padding. A
        # source that owes nothing gives nothing: one smaller than a context would give an epoch each window.
        if wanted > 0 and remaining[name] - wanted < context_tokens:
            wanted = remaining[name]
        window[name], after[name] = streams[name].take(positions[name], wanted, context_tokens)
        drawn[name] += window[name].tokens
    return window, Drawing(target, drawn, after)
