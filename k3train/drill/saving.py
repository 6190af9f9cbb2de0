"""The faults that a save meets: its writers die, its disk is full or slow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from k3train.config.schema import WhenBusy
from k3train.drill.bench import Bench, read_trained
from k3train.drill.row import Row, Seen
from k3train.drill.tiny import LAYOUTS
from k3train.train.signals import EXIT_DONE

TWO = next(iter(LAYOUTS))


def kill_async(bench: Bench) -> Seen:
    """#3: the writer of a rank dies, then a rank while its writer writes."""
    run = bench.new_run(TWO, restarts=1)
    run.checkpoint = replace(run.checkpoint, asynchronous=True)
    faults = [
        {"point": "ckpt.shard", "kind": "kill", "rank": 1, "step": 2, "occurrence": 20},
        {"point": "ckpt.after_shard_write", "kind": "slow", "seconds": 1, "rank": 0, "step": 4},
        {"point": "step.forward", "kind": "kill", "rank": 0, "step": 5},
        {"point": "ckpt.after_shard_write", "kind": "kill", "rank": 0, "step": 6, "restart": 1},
    ]
    outcome = bench.start(run, faults)
    trained = read_trained(run)
    differ, lost = trained.differ_from(bench.expected(TWO)), trained.lost_checkpoints() + outcome.without
    late = [event["step"] for event in trained.named("checkpoint_failed")]
    return Seen(
        as_expected=outcome.code == EXIT_DONE
        and [fault["kind"] for fault in outcome.happened].count("kill") == 3
        and len(outcome.failures) == 1
        and late == [2, 6]
        and not (differ or lost or outcome.orphans),
        words=f"failed saves of steps {late} reported, {differ} losses differ, {lost} checkpoints lost",
        detect_seconds=max(outcome.detect_seconds(), default=None),
        lost_steps=trained.lost_steps(),
        details=outcome.output,
    )


def full_disk(bench: Bench) -> Seen:
    """#11: one rank finds no space for its part of a checkpoint."""
    run = bench.new_run(TWO)
    outcome = bench.start(run, [{"point": "ckpt.shard", "kind": "enospc", "rank": 1, "step": 4}])
    trained = read_trained(run)
    differ = trained.differ_from(bench.expected(TWO))
    told = [event["detail"]["reason"] for event in trained.named("checkpoint_failed")]
    clear = [reason for reason in told if "No space left on device" in reason and "are free" in reason]
    left = list((Path(run.dir) / "checkpoints").glob("*.tmp-*"))
    return Seen(
        as_expected=outcome.code == EXIT_DONE and len(told) == len(clear) == 1 and not left and not differ,
        words=f"{len(clear)} of {len(told)} reports name the free space, {len(left)} pieces left, "
        f"{differ} losses differ",
        detect_seconds=0.0 if clear else None,
        lost_steps=trained.lost_steps(),
        details=outcome.output,
    )


def slow_disk(bench: Bench) -> Seen:
    """#12: writing takes longer than the steps up to the next save."""
    run = bench.new_run(TWO)
    run.checkpoint = replace(run.checkpoint, asynchronous=True, when_busy=WhenBusy.skip)
    slow = {"point": "ckpt.after_shard_write", "kind": "slow", "seconds": 15, "rank": 1, "step": 2}
    outcome = bench.start(run, [slow])
    trained = read_trained(run)
    differ = trained.differ_from(bench.expected(TWO))
    skipped = [event["step"] for event in trained.named("checkpoint_skipped")]
    return Seen(
        as_expected=outcome.code == EXIT_DONE and 4 in skipped and not differ,
        words=f"saves of steps {skipped} left out while one was written, {differ} losses differ",
        lost_steps=trained.lost_steps(),
        details=outcome.output,
    )


SAVING = (
    Row(
        name="async-kill",
        matrix="3",
        fault="SIGKILL of writers, and of a rank beside its writer",
        expected="failed saves reported, same bits",
        play=kill_async,
    ),
    Row(
        name="full-disk",
        matrix="11",
        fault="no space on rank 1 in one save",
        expected="reported, training goes on",
        play=full_disk,
    ),
    Row(
        name="slow-disk",
        matrix="12",
        fault="a save takes 15 s longer",
        expected="training goes on beside it",
        play=slow_disk,
    ),
)
