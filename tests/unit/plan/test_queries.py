"""Balance of MLA's attention over context-parallel ranks, measured from the assignment."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from k3train.plan.queries import assign_queries, head_parts, overlap, work_before


def natural(n: int, seed: int, longest: int) -> tuple[int, ...]:
    """Borders of documents of log-normal lengths, median 1,100 tokens, that fill a buffer of n tokens."""
    generator, borders = random.Random(seed), [0]
    while borders[-1] < n:
        length = int(generator.lognormvariate(7, 1.6))
        borders.append(min(borders[-1] + max(16, min(length, longest)), n))
    return tuple(borders)


BUFFERS = {
    f"{name} {n // 1024}K": borders
    for n in (65_536, 262_144)
    for name, borders in {
        "natural": natural(n, 1, n),
        "natural and cut at 8K": natural(n, 2, 8192),
        "one document": (0, n),
        "half one document": (0, n // 2, *(n // 2 + b for b in natural(n // 2, 3, n)[1:])),
        "half one document, at the end": (*natural(n // 2, 4, n), n),
        "equal": tuple(range(0, n + 1, 1024)),
    }.items()
}


def rank_work(borders: tuple[int, ...], heads: int, cp: int) -> list[int]:
    """Pairs of query and key, times heads, of each context-parallel rank of one tensor-parallel rank."""
    parts = head_parts(heads, cp)
    shares: list[int] = []
    for ranges in assign_queries(borders, cp // parts):
        ends = work_before(borders, [position for each in ranges for position in each])
        shares.append(sum(ends[1::2]) - sum(ends[::2]))
    return [shares[rank // parts] * (heads // parts) for rank in range(cp)]


@pytest.mark.parametrize("heads", [24, 12, 6, 25], ids=lambda h: f"{head_parts(h, 8)} parts of the heads")
@pytest.mark.parametrize("name", BUFFERS)
def test_no_rank_of_eight_does_more_than_its_part(name: str, heads: int) -> None:
    work = rank_work(BUFFERS[name], heads, 8)
    lengths = [b - a for a, b in pairwise(BUFFERS[name])]
    assert sum(work) == heads * sum(t * (t + 1) // 2 for t in lengths), "every pair is somebody's"
    imbalance = max(work) * len(work) / sum(work)
    print(f"{name}, {heads} heads: {imbalance:.4f}")
    assert imbalance <= 1.01
    if heads == 24:
        assert imbalance == 1, "whole heads: equal work by construction"


def test_contiguous_shares_would_not_do() -> None:
    n = 65_536
    before = work_before((0, n), [rank * n // 8 for rank in range(9)])
    shares = [b - a for a, b in pairwise(before)]
    assert 1.85 < max(shares) * 8 / sum(shares) < 1.9


@pytest.mark.parametrize(("n", "shares"), [(24, 2), (7, 7), (100, 3), (65_536, 8)])
def test_shares_tile_the_buffer_in_equal_numbers(n: int, shares: int) -> None:
    given = assign_queries((0, n // 3, n), shares)
    assert sorted(t for ranges in given for a, b in ranges for t in range(a, b)) == list(range(n))
    rows = [sum(b - a for a, b in ranges) for ranges in given]
    assert max(rows) - min(rows) <= 16
    assert all(a[1] < b[0] for ranges in given for a, b in pairwise(ranges))


def test_work_before_counts_pairs() -> None:
    assert work_before((0, 2, 5), [0, 1, 2, 3, 5]) == [0, 1, 3, 4, 9]


def test_overlap() -> None:
    assert overlap([(0, 4), (6, 9)], 3, 7) == ((3, 4), (6, 7))
    assert overlap([(0, 4)], 4, 7) == ()
