"""The micro-batch: labels stay inside documents, segments tile the buffer, rank slices re-assemble."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3train.data.batch import IGNORE, MicroBatch, Piece, join_batches, join_pieces
from k3train.data.device import to_device


def make(lengths: list[list[int]], context: int) -> MicroBatch:
    rng = np.random.default_rng(0)
    pieces = [[Piece("s", i, 0, n) for i, n in enumerate(row)] for row in lengths]
    tokens = [[rng.integers(1, 1000, n).astype(np.int32) for n in row] for row in lengths]
    return join_pieces(pieces, tokens, context_tokens=context, pad=0)


def test_labels_of_documents_of_one_two_and_three_tokens() -> None:
    tokens = [[np.array([11]), np.array([21, 22]), np.array([31, 32, 33])]]
    pieces = [[Piece("s", 0, 0, 1), Piece("s", 1, 0, 2), Piece("s", 2, 0, 3)]]
    batch = join_pieces(pieces, tokens, context_tokens=8, pad=0)
    assert batch.tokens.tolist() == [11, 21, 22, 31, 32, 33, 0, 0]
    assert batch.labels.tolist() == [IGNORE, 22, IGNORE, 32, 33, IGNORE, IGNORE, IGNORE]
    assert batch.labels_mtp.tolist() == [IGNORE, IGNORE, IGNORE, 33, IGNORE, IGNORE, IGNORE, IGNORE]
    assert batch.cu_seqlens.tolist() == [0, 1, 3, 6, 8]
    assert batch.valid.tolist() == [True] * 6 + [False] * 2


@given(
    rows=st.lists(
        st.lists(st.integers(1, 9), min_size=1, max_size=6).filter(lambda r: sum(r) <= 24),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=60)
def test_labels_against_their_definition(rows: list[list[int]]) -> None:
    batch = make(rows, 24)
    assert batch.cu_seqlens[0] == 0
    assert batch.cu_seqlens[-1] == len(batch.tokens) == 24 * len(rows)
    assert np.all(np.diff(batch.cu_seqlens) > 0)
    assert set(range(0, len(batch.tokens) + 1, 24)) <= set(batch.cu_seqlens.tolist())
    segment = np.repeat(np.arange(len(batch.cu_seqlens) - 1), np.diff(batch.cu_seqlens))
    for ahead, labels in ((1, batch.labels), (2, batch.labels_mtp)):
        for t in range(len(batch.tokens)):
            inside = t + ahead < len(segment) and segment[t] == segment[t + ahead] and batch.valid[t]
            assert labels[t] == (batch.tokens[t + ahead] if inside else IGNORE)
    assert sum(p.length for p in batch.documents) == batch.valid.sum()


def test_joining_equals_making_at_once() -> None:
    rows = [[3, 4], [8], [1, 1, 1]]
    rng = np.random.default_rng(1)
    pieces = [[Piece("s", i, 0, n) for i, n in enumerate(row)] for row in rows]
    tokens = [[rng.integers(1, 1000, n) for n in row] for row in rows]
    whole = join_pieces(pieces, tokens, context_tokens=8, pad=0)
    parts = [join_pieces([p], [t], context_tokens=8, pad=0) for p, t in zip(pieces, tokens, strict=True)]
    joined = join_batches(parts)
    for field in ("tokens", "labels", "labels_mtp", "cu_seqlens", "valid"):
        np.testing.assert_array_equal(getattr(joined, field), getattr(whole, field))
    assert joined.documents == whole.documents


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_context_parallel_slices_reassemble(cp: int) -> None:
    batch = make([[3, 9, 2], [16]], 16)
    ranks = [to_device(batch, cp_rank=r, cp_size=cp) for r in range(cp)]
    for field in ("tokens", "labels", "labels_mtp"):
        whole = np.concatenate([getattr(r, field).numpy()[0] for r in ranks])
        np.testing.assert_array_equal(whole, getattr(batch, field))
    np.testing.assert_array_equal(np.concatenate([r.packing.valid.numpy() for r in ranks]), batch.valid)
    assert all(r.packing.cu_seqlens == tuple(batch.cu_seqlens.tolist()) for r in ranks)


def test_context_parallel_size_must_divide() -> None:
    with pytest.raises(ValueError, match="cp=3"):
        to_device(make([[16]], 16), cp_size=3)
