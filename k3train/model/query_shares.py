"""Sends MLA's queries to the ranks that attend for them, and outputs back.

Legend: n tokens of the micro-batch buffer, h heads of a tensor-parallel rank. A context-parallel rank holds
n/cp consecutive tokens. Rank r attends with part r % p of the heads, p parts in all, for share r // p of the
queries (``plan/queries.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from k3train.parallel.collectives import exchange_rows
from k3train.plan.queries import Range, assign_queries, head_parts, overlap


class QueryShares:
    """The exchange for one buffer of documents, as one rank of ``group`` sees it."""

    def __init__(self, group: Any, heads: int, borders: tuple[int, ...]) -> None:
        self.group, rank, ranks = group, group.rank(), group.size()
        self.parts = head_parts(heads, ranks)
        shares = assign_queries(borders, ranks // self.parts)
        self.ranges: tuple[Range, ...] = shares[rank // self.parts]
        """Buffer positions of this rank's queries."""
        held = [(r * borders[-1] // ranks, (r + 1) * borders[-1] // ranks) for r in range(ranks)]
        here = held[rank][0]
        self.local = [[(a - here, b - here) for a, b in overlap(ranges, *held[rank])] for ranges in shares]
        """Of each share: this rank's tokens in it, counted from its first."""
        self.send = [_rows(self.local[r // self.parts]) for r in range(ranks)]
        self.receive = [_rows(overlap(self.ranges, *place)) for place in held]

    def scatter(self, q: Tensor) -> Tensor:
        """[n/cp, h, d] -> this rank's queries and heads, [rows, h/parts, d]. Every rank must call this."""
        blocks = []
        for ranges in filter(None, self.local):
            rows = torch.cat([q[a:b] for a, b in ranges])
            blocks.append(rows.unflatten(1, (self.parts, -1)).transpose(0, 1).flatten(0, 1))
        return exchange_rows(torch.cat(blocks), self.send, self.receive, self.group)

    def gather(self, out: Tensor) -> Tensor:
        """[rows, h/parts, e] -> [n/cp, h, e]: the way back. Every rank must call this."""
        back = exchange_rows(out, self.receive, self.send, self.group)
        pieces: dict[int, Tensor] = {}
        blocks = back.split([self.parts * _rows(ranges) for ranges in self.local])
        for ranges, block in zip(self.local, blocks, strict=True):
            rows = block.unflatten(0, (self.parts, _rows(ranges))).transpose(0, 1).flatten(1, 2)
            for (start, _), piece in zip(ranges, rows.split([b - a for a, b in ranges]), strict=True):
                pieces[start] = piece
        return torch.cat([pieces[start] for start in sorted(pieces)])


def _rows(ranges: Sequence[Range]) -> int:
    return sum(stop - start for start, stop in ranges)
