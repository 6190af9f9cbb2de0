"""Random SIGKILLs of random ranks, one run after another, until there were as many as asked for.

Every other run saves beside training. There a kill while writing hits the writer, which its rank survives, so
the rank is killed too, some steps later.
"""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from k3train.drill.bench import Bench, Outcome, read_trained
from k3train.drill.tiny import LAYOUTS

FIRST_RANK_ONLY = ("ckpt.manifest", "ckpt.rename", "ckpt.pointer", "ckpt.mid_prune")

MOMENTS: dict[str, list[tuple[str, int]]] = {
    "compute": [
        ("setup.start", 1),
        ("setup.built", 1),
        ("setup.restored", 1),
        ("data.next", 5),
        ("step.begin", 5),
        ("step.forward", 20),
        ("step.backward", 5),
        ("step.update", 5),
        ("step.end", 5),
        ("eval.batch", 2),
    ],
    "save": [("ckpt.begin", 2), ("ckpt.shard", 80), ("ckpt.after_shard_write", 2), ("ckpt.manifest", 2)],
    "rename": [("ckpt.rename", 2), ("ckpt.pointer", 2)],
    "pruning": [("ckpt.prune", 2), ("ckpt.mid_prune", 2)],
    "any moment": [("setup.start", 1)],
}
"""Where kills fall: points, and up to which occurrence. Those of any moment come some time after a start."""

WRITERS = ("ckpt.shard", "ckpt.after_shard_write")
"""Points of the process that writes, which is not the rank when it saves beside training."""

LATEST_SECONDS = 4.0
"""How long after its start a rank is killed at any moment, at most; a run of a rank takes about as long."""

KILLS_PER_RUN = 8


@dataclass(kw_only=True, slots=True)
class Storm:
    """What many kills came to."""

    kills: Counter[str] = field(default_factory=Counter)
    """By moment."""
    beside: int = 0
    """How many of them in runs that save beside training."""
    writers: int = 0
    """How many of those hit a writer and not its rank."""
    runs: int = 0
    starts: int = 0
    mismatches: int = 0
    """Recorded losses that differ from the golden run's in any bit, or are missing."""
    lost: int = 0
    """Starts from an older checkpoint than announced, and looks without a good one."""
    orphans: int = 0
    failed: list[str] = field(default_factory=list)
    """Runs that did not end well, with what they printed."""
    looks: int = 0
    detect: list[float] = field(default_factory=list)
    """Seconds from a kill until the supervisor noticed."""
    seconds: float = 0.0
    lost_steps: int = 0

    @property
    def total(self) -> int:
        """Kills so far."""
        return self.kills.total()

    @property
    def as_expected(self) -> bool:
        """Whether nothing was lost, changed or left over."""
        return not (self.mismatches or self.lost or self.orphans or self.failed)


type Moments = dict[tuple[int, str], str]
"""Kind of moment of each kill, by start and point."""


def plan_of_kills(
    rng: random.Random, ranks: int, count: int, *, asynchronous: bool
) -> tuple[list[dict[str, Any]], Moments]:
    """A kill of a rank in each of ``count`` starts, and of a writer before it in some that have writers."""
    faults: list[dict[str, Any]] = []
    moments: Moments = {}

    def add(start: int, moment: str, name: str, latest: int) -> None:
        fault: dict[str, Any] = {
            "point": name,
            "kind": "kill",
            "rank": 0 if name in FIRST_RANK_ONLY else rng.randrange(ranks),
            "occurrence": rng.randint(1, latest),
            "restart": start,
        }
        if moment == "any moment":
            fault["seconds"] = rng.uniform(0, LATEST_SECONDS)
        faults.append(fault)
        moments[start, name] = moment

    for start in range(count):
        moment = rng.choice(list(MOMENTS))
        name, latest = rng.choice(MOMENTS[moment])
        add(start, moment, name, latest)
        if asynchronous and name in WRITERS:
            add(start, "compute", "step.begin", 5)
    return faults, moments


def storm(bench: Bench, kills: int) -> Storm:
    """Kill ranks ``kills`` times on runs of every layout in turn, each to its end."""
    rng = random.Random(bench.seed)
    result = Storm()
    while result.total < kills and len(result.failed) < 5:
        layout = list(LAYOUTS)[result.runs % len(LAYOUTS)]
        bench.expected(layout)
        began = time.monotonic()
        count = min(KILLS_PER_RUN, kills - result.total)
        run = bench.new_run(layout, restarts=count)
        run.checkpoint.asynchronous = result.runs % 2 == 1
        faults, moments = plan_of_kills(
            rng, LAYOUTS[layout].ranks, count, asynchronous=run.checkpoint.asynchronous
        )
        outcome = bench.start(run, faults)
        _count(result, bench, layout, outcome, moments)
        result.seconds += time.monotonic() - began
        print(
            f"{result.total} kills, {result.runs} runs, {result.mismatches} mismatches, {result.lost} lost",
            flush=True,
        )
    return result


def _count(result: Storm, bench: Bench, layout: str, outcome: Outcome, moments: Moments) -> None:
    trained = read_trained(outcome.run)
    result.runs += 1
    result.starts += 1 + len(outcome.failures)
    result.kills.update(moments[fault["restart"], fault["point"]] for fault in outcome.happened)
    if outcome.run.checkpoint.asynchronous:
        result.beside += len(outcome.happened)
        result.writers += sum(fault["point"] in WRITERS for fault in outcome.happened)
    wrong = trained.differ_from(bench.expected(layout))
    lost = trained.lost_checkpoints() + outcome.without
    result.mismatches += wrong
    result.lost += lost
    result.orphans += outcome.orphans
    result.looks += outcome.looks
    result.detect += outcome.detect_seconds()
    result.lost_steps = max(result.lost_steps, trained.lost_steps())
    if outcome.code:
        result.failed.append(f"{outcome.run.dir} ended with {outcome.code}:\n{outcome.output}")
    elif not wrong and not lost:
        shutil.rmtree(outcome.run.dir)  # what went wrong stays to be looked at
