"""Which softmax attention each context-parallel rank computes. No torch.

Every rank has all keys of its heads. Heads are split first: ranks with other heads do equal work whatever the
documents. Where heads do not go round, ranks with the same heads split the queries: the buffer is cut into
short chunks, dealt out so that all have as many tokens and nearly as much work.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

Range = tuple[int, int]
"""Buffer positions from the first up to, not including, the second."""
CHUNKS_PER_SHARE = 16
"""Chunks that each share of the queries consists of."""


def head_parts(heads: int, cp: int) -> int:
    """Into how many parts ``cp`` ranks split the ``heads`` that a tensor-parallel rank has.

    The largest number that divides both; cp / head_parts ranks then split the queries of each part.
    """
    return math.gcd(heads, cp)


@lru_cache(maxsize=64)
def assign_queries(borders: tuple[int, ...], shares: int) -> tuple[tuple[Range, ...], ...]:
    """Queries of each share, ascending; together they are the buffer whose documents ``borders`` delimit.

    The chunk with most work goes first, each to the share with least among those that lack chunks. The
    buffer must have at least as many tokens as there are shares.
    """
    n = borders[-1]
    assert n >= shares, (n, shares)
    per_share = min(CHUNKS_PER_SHARE, n // shares)
    cuts = [i * n // (shares * per_share) for i in range(shares * per_share + 1)]
    before = work_before(borders, cuts)
    chunks = sorted((before[i] - before[i + 1], cut) for i, cut in enumerate(pairwise(cuts)))
    waiting = [(0, share) for share in range(shares)]
    given: list[list[Range]] = [[] for _ in range(shares)]
    for less, chunk in chunks:
        load, share = heapq.heappop(waiting)
        given[share].append(chunk)
        if len(given[share]) < per_share:
            heapq.heappush(waiting, (load - less, share))
    return tuple(_joined(sorted(ranges)) for ranges in given)


def work_before(borders: Sequence[int], positions: Sequence[int]) -> list[int]:
    """Pairs of a query before each position and a key that it sees, in causal attention by document."""
    whole = [0, *accumulate(_triangle(stop - start) for start, stop in pairwise(borders))]
    found: list[int] = []
    for position in positions:
        document = min(bisect_right(borders, position), len(borders) - 1) - 1
        found.append(whole[document] + _triangle(position - borders[document]))
    return found


def overlap(ranges: Sequence[Range], start: int, stop: int) -> tuple[Range, ...]:
    """The parts of ``ranges`` that lie in [start, stop)."""
    cut = ((max(a, start), min(b, stop)) for a, b in ranges)
    return tuple((a, b) for a, b in cut if a < b)


def _triangle(tokens: int) -> int:
    return tokens * (tokens + 1) // 2


def _joined(ranges: list[Range]) -> tuple[Range, ...]:
    """Ranges that touch, as one."""
    out = ranges[:1]
    for start, stop in ranges[1:]:
        if start == out[-1][1]:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return tuple(out)
