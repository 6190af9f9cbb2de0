"""What one forward pass reads: packed sequences, whole, before context parallelism slices them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

IGNORE = -100
"""Label of a position that carries no loss."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of one document: tokens [start, start + length) of document ``document`` of ``source``."""

    source: str
    document: int
    start: int
    length: int


@dataclass(kw_only=True, slots=True)
class MicroBatch:
    """Packed sequences laid end to end in one buffer of n = sequences * context_tokens tokens."""

    tokens: np.ndarray
    """int32 [n]."""
    labels: np.ndarray
    """int32 [n]: the next token of the same document; IGNORE at a document's last token and on padding."""
    labels_mtp: np.ndarray
    """int32 [n]: the token after next of the same document; IGNORE at its last two tokens and on padding."""
    cu_seqlens: np.ndarray
    """int32 [segments + 1]: segment borders. They tile the buffer: a sequence's padding is a segment too."""
    valid: np.ndarray
    """bool [n]: False on padding."""
    documents: list[Piece]
    """The pieces in buffer order, padding left out."""


def join_pieces(
    pieces: list[list[Piece]], tokens: list[list[np.ndarray]], *, context_tokens: int, pad: int
) -> MicroBatch:
    """Lay sequences end to end: ``pieces[i]`` with its ``tokens[i]`` makes up sequence i, padded at its end.

    Labels are made here, on whole documents, so that no later slicing can cross a border.
    """
    n = len(pieces) * context_tokens
    buffer = np.full(n, pad, np.int32)
    labels = np.full(n, IGNORE, np.int32)
    labels_mtp = np.full(n, IGNORE, np.int32)
    valid = np.zeros(n, bool)
    borders = [0]
    for i, texts in enumerate(tokens):
        at = i * context_tokens
        for text in texts:
            stop = at + len(text)
            buffer[at:stop] = text
            labels[at : stop - 1] = text[1:]
            if len(text) > 2:
                labels_mtp[at : stop - 2] = text[2:]
            valid[at:stop] = True
            borders.append(stop)
            at = stop
        assert at <= (i + 1) * context_tokens, f"sequence {i} holds {at - i * context_tokens} tokens"
        if at < (i + 1) * context_tokens:
            borders.append((i + 1) * context_tokens)
    return MicroBatch(
        tokens=buffer,
        labels=labels,
        labels_mtp=labels_mtp,
        cu_seqlens=np.array(borders, np.int32),
        valid=valid,
        documents=[piece for sequence in pieces for piece in sequence],
    )


def join_batches(batches: list[MicroBatch]) -> MicroBatch:
    """One micro-batch out of several, in their order."""
    offsets = np.cumsum([0, *(len(b.tokens) for b in batches)])
    borders = [batches[0].cu_seqlens[:1]]
    borders += [b.cu_seqlens[1:] + o for b, o in zip(batches, offsets, strict=False)]
    return MicroBatch(
        tokens=np.concatenate([b.tokens for b in batches]),
        labels=np.concatenate([b.labels for b in batches]),
        labels_mtp=np.concatenate([b.labels_mtp for b in batches]),
        cu_seqlens=np.concatenate(borders).astype(np.int32),
        valid=np.concatenate([b.valid for b in batches]),
        documents=[piece for b in batches for piece in b.documents],
    )


def padding_tokens(batches: list[MicroBatch]) -> int:
    """How many tokens are padding."""
    return sum(batch.valid.size - int(batch.valid.sum()) for batch in batches)


def squared_lengths(batches: list[MicroBatch]) -> float:
    """Sum of the squared lengths of all segments, padding among them: what attention's FLOPs grow with."""
    return float(sum(np.square(np.diff(batch.cu_seqlens).astype(np.float64)).sum() for batch in batches))
