"""The faults that only a guard sees: a hang, a bit that flips, a slow rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from k3train.config.schema import Guards
from k3train.drill.bench import Bench, read_trained
from k3train.drill.row import Row, Seen
from k3train.drill.tiny import LAYOUTS
from k3train.train.signals import EXIT_DONE, EXIT_HARDWARE, EXIT_HUNG
from k3train.train.watchdog import STACKS

TWO, THREE, FOUR = LAYOUTS
HANG_SECONDS = 10
"""What the watchdog of these runs waits at least; a busy machine needs it."""


def hang(bench: Bench) -> Seen:
    """#5: a rank hangs in each section."""
    sections = {
        "data.next": "step",
        "step.forward": "step",
        "step.update": "step",
        "eval.batch": "evaluation",
        "ckpt.after_shard_write": "save",
        "ckpt.verify": "verification",
    }
    run = bench.new_run(TWO, restarts=len(sections))
    run.guards = Guards(hang_floor_seconds=HANG_SECONDS, hang_ceiling_seconds=4 * HANG_SECONDS)
    faults: list[dict[str, Any]] = [
        {"point": name, "kind": "hang", "rank": 1, "restart": restart, "occurrence": 4 if restart < 3 else 1}
        for restart, name in enumerate(sections)
    ]
    outcome = bench.start(run, faults)
    trained = read_trained(run)
    differ, lost = trained.differ_from(bench.expected(TWO)), trained.lost_checkpoints() + outcome.without
    told = [file.read_text() for file in sorted(Path(run.dir, STACKS).glob("*/summary.txt"))]
    named = sum(
        "rank 1 on" in each and f"in {section} of" in each
        for each, section in zip(told, sections.values(), strict=False)
    )
    codes = {code for failure in outcome.failures for code in failure["ranks"].values()}
    return Seen(
        as_expected=outcome.code == EXIT_DONE
        and named == len(outcome.failures) == len(sections)
        and codes == {EXIT_HUNG}
        and not (differ or lost or outcome.orphans),
        words=f"{named} of {len(sections)} hangs named with rank and section, {differ} losses differ",
        detect_seconds=max(outcome.detect_seconds(), default=None),
        lost_steps=trained.lost_steps(),
        details=outcome.output,
    )


def flip(bench: Bench) -> Seen:
    """#9: one bit of a weight flips on one of three replicas."""
    run = bench.new_run(THREE, restarts=1)
    run.guards = Guards(digest_every_steps=1)
    fault = {"point": "step.weights", "kind": "flip", "bit": 12, "rank": 1, "step": 5}
    outcome = bench.start(run, [fault])
    trained = read_trained(run)
    differ = trained.differ_from(bench.expected(THREE))
    codes = {code for failure in outcome.failures for code in failure["ranks"].values()}
    found = [event for event in trained.events if event["detail"].get("suspects") == [1]]
    return Seen(
        as_expected=outcome.code == EXIT_DONE and codes == {EXIT_HARDWARE} and bool(found) and not differ,
        words=f"{'rank 1 named' if found else 'not found'} in step {found[0]['step'] if found else '-'}, "
        f"codes {sorted(codes)}; then {differ} losses differ",
        detect_seconds=max(outcome.detect_seconds(), default=None),
        lost_steps=trained.lost_steps(),
        details=outcome.output,
    )


def straggler(bench: Bench) -> Seen:
    """#18: one rank of three is slow, from before the first measured step on."""
    run = bench.new_run(THREE)
    run.guards = Guards(straggler_every_steps=1)
    slow = {"point": "step.forward", "kind": "slow", "seconds": 1, "rank": 1, "occurrence": 4, "times": 0}
    outcome = bench.start(run, [slow])
    trained = read_trained(run)
    differ = trained.differ_from(bench.expected(THREE))
    named = [(event["step"], event["detail"]["rank"]) for event in trained.named("straggler")]
    return Seen(
        as_expected=outcome.code == EXIT_DONE and {rank for _, rank in named} == {1} and not differ,
        words=f"named rank {', '.join(f'{rank} in step {step}' for step, rank in named) or '-'}",
        lost_steps=trained.lost_steps(),
        details=outcome.output,
    )


WATCHED = (
    Row(
        name="hang",
        matrix="5",
        fault="rank 1 hangs in loading, computing, evaluating, saving, verifying",
        expected="named, stacks, code 18, same bits",
        play=hang,
    ),
    Row(
        name="flip",
        matrix="9",
        fault="one bit of a weight flips on rank 1 of 3",
        expected="rank 1 named, code 16, same bits",
        play=flip,
    ),
    Row(
        name="straggler",
        matrix="18",
        fault="rank 1 of 3 takes a second more in each step",
        expected="rank 1 named, no other",
        play=straggler,
    ),
)
