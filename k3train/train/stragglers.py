"""Finds slow ranks: each rank's own time in a step, without its waits for others."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from k3train.parallel.layout import Layout, rank_coordinates
from k3train.train.setup import StageSetup

IN_A_ROW = 3
"""Measurements in a row in which a rank must be slow: one may be chance."""
LEAST_SECONDS = 0.02
"""Smaller differences are not worth a word."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slowest:
    """The slowest rank of one measured step; the same on every rank."""

    rank: int
    ratio: float
    """Its own time over the median of its peers: the other ranks at its place in the pipeline, or all others
    when there are none."""
    seconds: float
    """Its own time."""
    named: bool = False
    """It has been slow often enough, and this is the first time that this is known."""


class Pace:
    """Measures this rank's own time in every ``every_steps``-th step; 0 never does.

    What a rank waits for its peers passes in ``Work.wait``, which is timed in the measured steps alone: by
    the clock on the CPU, by events on the stream on a GPU.
    """

    def __init__(self, *, every_steps: int, ratio: float) -> None:
        self._every, self._ratio = every_steps, ratio
        self._rank, self._times = -1, 0
        self._watch: _Watch | None = None

    def begin(self, step: int, device: torch.device) -> None:
        """Step ``step``, from 1, begins with its wait for data."""
        if self._every and step % self._every == 0:
            self._watch = _EventWatch() if device.type == "cuda" else _Watch()

    def end(self, setup: StageSetup) -> Slowest | None:
        """The step is over; the slowest rank if it was measured. Every rank must call this."""
        if self._watch is None:
            return None
        own = self._watch.own_seconds()
        self._watch = None
        world = setup.groups.layout.world
        if world == 1:
            return None
        everyone = torch.zeros(world, dtype=torch.float64, device=setup.device)
        everyone[dist.get_rank()] = own
        dist.all_reduce(everyone)
        return self.judge(slowest(setup.groups.layout, everyone.tolist()))

    def judge(self, found: Slowest) -> Slowest:
        """The measurement, named when the same rank has been slow ``IN_A_ROW`` times."""
        slow = found.ratio > self._ratio and found.seconds * (1 - 1 / found.ratio) > LEAST_SECONDS
        self._times = 0 if not slow else self._times + 1 if found.rank == self._rank else 1
        self._rank = found.rank
        if self._times != IN_A_ROW:
            return found
        return Slowest(rank=found.rank, ratio=found.ratio, seconds=found.seconds, named=True)


def slowest(layout: Layout, seconds: list[float]) -> Slowest:
    """The rank with the largest ratio of its own ``seconds`` (by rank) to its peers'; needs two ranks."""
    stages: dict[int, list[int]] = {}
    for rank in range(layout.world):
        stages.setdefault(rank_coordinates(layout, rank).pp, []).append(rank)

    def ratio(rank: int) -> float:
        peers = stages[rank_coordinates(layout, rank).pp]
        others = [seconds[r] for r in (peers if len(peers) > 1 else range(layout.world)) if r != rank]
        return seconds[rank] / max(statistics.median(others), 1e-9)

    worst = max(range(layout.world), key=ratio)
    return Slowest(rank=worst, ratio=ratio(worst), seconds=seconds[worst])


class _Watch:
    """Wall time less the time inside ``Work.wait``, from construction to ``own_seconds``."""

    def __init__(self) -> None:
        self._waited = 0.0
        self._work: Any = dist.Work
        self._wait = self._work.wait
        watch = self

        def timed(work: Any, *arguments: Any) -> Any:
            mark = watch._mark()
            try:
                return watch._wait(work, *arguments)
            finally:
                watch._count(mark, watch._mark())

        self._work.wait = timed
        self._start = self._mark()

    def own_seconds(self) -> float:
        """The time so far; ends the measurement."""
        self._work.wait = self._wait
        return self._between(self._start, self._mark()) - self._total()

    def _mark(self) -> Any:
        return time.perf_counter()

    def _count(self, before: Any, after: Any) -> None:
        self._waited += after - before

    def _between(self, before: Any, after: Any) -> float:
        return after - before

    def _total(self) -> float:
        return self._waited


class _EventWatch(_Watch):
    """The same on the current CUDA stream, where a wait is a stretch in which no kernel of ours runs."""

    def __init__(self) -> None:
        self._waits: list[tuple[Any, Any]] = []
        super().__init__()

    def _mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _count(self, before: Any, after: Any) -> None:
        self._waits.append((before, after))

    def _between(self, before: Any, after: Any) -> float:
        after.synchronize()
        return before.elapsed_time(after) / 1000

    def _total(self) -> float:
        return sum(self._between(*pair) for pair in self._waits)
