"""Brings matrices that are scattered over ranks together at one owner each, and their updates back.

The distributed optimizer cuts momentum where its buffers end, not where matrices do, and tensor parallelism
cuts matrices themselves. Most matrices lie on one rank all the same; that rank owns them and nothing is sent.
For the others the owner fetches the missing pieces from the ranks that hold them (k3 report 5.2.2), point to
point: an all-to-all in which most messages are empty.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ROUND_ELEMENTS = 2**28
"""An owner holds about this many elements of matrices at a time."""
_SLACK = 1.1
"""How far above the mean an owner's work may lie to save sending a matrix."""


@dataclass(frozen=True, slots=True, order=True)
class Matrix:
    """One matrix that is orthogonalised as a whole."""

    name: str
    """Of its parameter in the whole model."""
    index: int
    """Block of the parameter: head (and part of it) or expert, counted over all ranks."""
    rows: int
    columns: int
    shards: int = 1
    """Equal parts that tensor-parallel ranks hold."""
    dim: int = 0
    """Which axis the shards cut."""

    @property
    def elements(self) -> int:
        """Rows times columns."""
        return self.rows * self.columns

    @property
    def cost(self) -> int:
        """In proportion to the FLOPs of its Newton-Schulz iteration."""
        return self.elements * min(self.rows, self.columns)


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """Consecutive elements of one shard of a matrix that one rank holds."""

    shard: int
    start: int
    stop: int
    rank: int
    """In the group."""
    place: int
    """Where the piece begins in that rank's flat buffer."""
    copy: bool = False
    """The rank only repeats what another one holds: it gets the update but is not asked for the momentum."""


@dataclass(slots=True)
class _Round:
    """What this rank sends and receives in one exchange; messages follow each other in order of rank."""

    asked: list[slice] = field(default_factory=list)
    """Own pieces to send, by owner."""
    asked_counts: list[int] = field(default_factory=list)
    arriving_counts: list[int] = field(default_factory=list)
    owned: list[tuple[Matrix, list[list[slice]]]] = field(default_factory=list)
    """Own matrices; of each shard, where its pieces lie in what arrives."""
    answers: list[tuple[int, int, slice]] = field(default_factory=list)
    """Pieces to send back, by receiver: which of ``owned``, shard, elements."""
    answer_counts: list[int] = field(default_factory=list)
    returning: list[slice] = field(default_factory=list)
    """Own pieces that come back, by owner."""
    returning_counts: list[int] = field(default_factory=list)


class Exchange:
    """Applies a function of whole matrices to a buffer of which every rank of ``group`` holds pieces.

    ``pieces`` are this rank's; every rank of the group must call this, and all agree on the plan. ``group``
    is tp x cp x dp: those who hold the same layers.
    """

    def __init__(self, pieces: Sequence[tuple[Matrix, Piece]], group: Any) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        everyone: list[Any] = [None] * self.size
        if self.size > 1:
            dist.all_gather_object(everyone, list(pieces), group=group)
        else:
            everyone = [list(pieces)]
        held: dict[Matrix, list[Piece]] = defaultdict(list)
        for matrix, piece in (each for rank in everyone for each in rank):
            held[matrix].append(piece)
        self.matrices = sorted(held)
        for matrix in self.matrices:
            held[matrix].sort()
        self.owners = assign_owners([(m, held[m]) for m in self.matrices], self.size)
        self.rounds = self._plan(held)

    def apply(self, buffer: Tensor, function: Callable[[list[Tensor]], list[Tensor]]) -> None:
        """Replace every matrix X in ``buffer``, flat, by function(X). Every rank of the group must call this.

        ``function`` gets and returns matrices of any shapes, those that this rank owns in one round.
        """
        for round_ in self.rounds:
            sent = _joined(buffer, (buffer[piece] for piece in round_.asked))
            arrived = self._swap(sent, round_.asked_counts, round_.arriving_counts)
            whole = [_assemble(matrix, shards, arrived) for matrix, shards in round_.owned]
            results = function(whole) if whole else []
            shards = [
                [part.reshape(-1) for part in result.chunk(matrix.shards, matrix.dim)]
                for (matrix, _), result in zip(round_.owned, results, strict=True)
            ]
            answers = _joined(buffer, (shards[which][shard][part] for which, shard, part in round_.answers))
            returned = self._swap(answers, round_.answer_counts, round_.returning_counts)
            start = 0
            for piece in round_.returning:
                stop = start + piece.stop - piece.start
                buffer[piece].copy_(returned[start:stop])
                start = stop

    def _swap(self, sent: Tensor, counts: list[int], arriving: list[int]) -> Tensor:
        if self.size == 1:
            return sent
        out = sent.new_empty(sum(arriving))
        dist.all_to_all_single(out, sent, arriving, counts, group=self.group)
        return out

    def _plan(self, held: dict[Matrix, list[Piece]]) -> list[_Round]:
        filled = [0] * self.size
        by_round: dict[int, list[tuple[Matrix, int]]] = defaultdict(list)
        for matrix, owner in zip(self.matrices, self.owners, strict=True):
            by_round[filled[owner] // ROUND_ELEMENTS].append((matrix, owner))
            filled[owner] += matrix.elements
        return [self._plan_round(by_round[i], held) for i in range(max(by_round, default=-1) + 1)]

    def _plan_round(self, matrices: list[tuple[Matrix, int]], held: dict[Matrix, list[Piece]]) -> _Round:
        round_ = _Round()
        mine = [matrix for matrix, owner in matrices if owner == self.rank]
        asked: dict[int, list[slice]] = {rank: [] for rank in range(self.size)}
        returning: dict[int, list[slice]] = {rank: [] for rank in range(self.size)}
        for matrix, owner in matrices:
            for piece in held[matrix]:
                if piece.rank == self.rank:
                    own = slice(piece.place, piece.place + piece.stop - piece.start)
                    returning[owner].append(own)
                    if not piece.copy:
                        asked[owner].append(own)
        round_.asked, round_.asked_counts = _by_rank(asked)
        round_.returning, round_.returning_counts = _by_rank(returning)

        arriving = [0] * self.size
        for piece in (piece for matrix in mine for piece in held[matrix] if not piece.copy):
            arriving[piece.rank] += piece.stop - piece.start
        round_.arriving_counts = arriving
        place = [0, *accumulate(arriving)]
        answers: dict[int, list[tuple[int, int, slice]]] = {rank: [] for rank in range(self.size)}
        for which, matrix in enumerate(mine):
            shards: list[list[slice]] = [[] for _ in range(matrix.shards)]
            for piece in held[matrix]:
                size = piece.stop - piece.start
                answers[piece.rank].append((which, piece.shard, slice(piece.start, piece.stop)))
                if not piece.copy:
                    shards[piece.shard].append(slice(place[piece.rank], place[piece.rank] + size))
                    place[piece.rank] += size
            round_.owned.append((matrix, shards))
        round_.answers = [answer for rank in answers.values() for answer in rank]
        round_.answer_counts = [sum(part.stop - part.start for *_, part in rank) for rank in answers.values()]
        return round_


def assign_owners(matrices: Sequence[tuple[Matrix, list[Piece]]], ranks: int) -> list[int]:
    """The rank that orthogonalises each matrix: who holds most of it, unless that would be too much work.

    The most expensive matrices choose first. One goes to the rank with the least work so far when its holder
    would come more than a tenth above the mean.
    """
    work = [0] * ranks
    limit = _SLACK * sum(matrix.cost for matrix, _ in matrices) / ranks
    heap = [(0, rank) for rank in range(ranks)]
    owners = [0] * len(matrices)
    for i in sorted(range(len(matrices)), key=lambda i: (-matrices[i][0].cost, i)):
        matrix, pieces = matrices[i]
        while heap[0][0] < work[heap[0][1]]:  # an entry from before this rank got more
            heapq.heapreplace(heap, (work[heap[0][1]], heap[0][1]))
        least = heap[0][1]
        shares: dict[int, int] = defaultdict(int)
        for piece in pieces:
            shares[piece.rank] += 0 if piece.copy else piece.stop - piece.start
        home = max(shares, key=lambda rank: (shares[rank], -rank))
        owner = home if work[home] + matrix.cost <= max(limit, work[least] + matrix.cost) else least
        work[owner] += matrix.cost
        owners[i] = owner
    return owners


def _by_rank(slices: dict[int, list[slice]]) -> tuple[list[slice], list[int]]:
    counts = [sum(own.stop - own.start for own in rank) for rank in slices.values()]
    return [own for rank in slices.values() for own in rank], counts


def _joined(like: Tensor, parts: Iterable[Tensor]) -> Tensor:
    listed = list(parts)
    return torch.cat(listed) if listed else like.new_empty(0)


def _assemble(matrix: Matrix, shards: list[list[slice]], arrived: Tensor) -> Tensor:
    """[rows, columns] from its pieces."""
    shape = [matrix.rows, matrix.columns]
    shape[matrix.dim] //= matrix.shards
    parts = []
    for pieces in shards:
        flat = arrived[pieces[0]] if len(pieces) == 1 else torch.cat([arrived[piece] for piece in pieces])
        assert flat.numel() == math.prod(shape), (matrix, flat.numel())
        parts.append(flat.view(shape))
    return parts[0] if len(parts) == 1 else torch.cat(parts, matrix.dim)
