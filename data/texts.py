"""One text of a corpus, and which texts are held out of training."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

HELDOUT_SHARE = 0.015
"""Share of documents held out."""
LONG_TOKENS = 33_000
"""The longest context of the debug curriculum and some more; a document this long is held out by rule."""
LONG_ENOUGH_TOKENS = 90_000
"""Longer ones stay in training when another can be had: holding them out would take too much text away."""


@dataclass(frozen=True, slots=True)
class Text:
    """One document before it is tokenised."""

    origin: str
    """Package and version it comes from."""
    licence: str
    title: str
    """Its place within the origin."""
    text: str

    @property
    def rank(self) -> int:
        """64-bit hash of the text: a place in an order that knows nothing of names or files."""
        return int.from_bytes(hashlib.sha256(self.text.encode()).digest()[:8], "little")


def distinct(texts: Iterable[Text]) -> list[Text]:
    """Every text once, empty ones left out."""
    return list({t.text: t for t in texts if t.text.strip()}.values())


def capped(texts: list[Text], num_bytes: int) -> list[Text]:
    """So many bytes of text, chosen by hash, in the order given."""
    kept: set[int] = set()
    total = 0
    for text in sorted(texts, key=lambda t: t.rank):
        size = len(text.text.encode())
        if total + size <= num_bytes:
            kept.add(text.rank)
            total += size
    return [t for t in texts if t.rank in kept]


def heldout_ranks(texts: list[Text], num_tokens: list[int], *, with_long: bool) -> set[int]:
    """Ranks of the texts of one source that are held out: by hash, and one long text when asked for."""
    chosen = {t.rank for t in texts if t.rank < HELDOUT_SHARE * 2**64}
    sized = sorted(zip(texts, num_tokens, strict=True), key=lambda pair: pair[0].rank)
    long = [(t.rank, n) for t, n in sized if n >= LONG_TOKENS]
    # Training keeps a long document too: with only one there is none to hold out.
    if with_long and len(long) > 1 and not any(rank in chosen for rank, _ in long):
        moderate = [rank for rank, n in long if n <= LONG_ENOUGH_TOKENS]
        chosen.add((moderate or [rank for rank, _ in long])[0])
    return chosen
