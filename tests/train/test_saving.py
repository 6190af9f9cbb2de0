"""Saves beside training in whole runs: same losses, same bytes, and what becomes of saves that fail."""

from __future__ import annotations

import json
import os
import resource
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from k3train.checkpoint.listing import committed
from k3train.checkpoint.manifest import read_manifest
from k3train.checkpoint.stage import TRAIN_STATE
from k3train.config.problems import Unavailable
from k3train.config.schema import Checkpoint, Run, WhenBusy
from k3train.faults import PLAN_VARIABLE, plan_from_environment
from k3train.monitor.metrics_file import METRICS
from k3train.train.signals import EXIT_BAD_STEP, EXIT_DONE
from tests.ranks import run_ranks
from tests.train.runs import losses, make_run, records, train_rank, train_run
from tests.train.test_guards import guarded_run, train_with


def saved(run: Run) -> dict[str, dict]:
    """Files and digests of each checkpoint, without the settings, which hold how it was saved."""
    folders = [path for _, path in committed(Path(run.dir) / "checkpoints")]
    manifests = {path.name: read_manifest(path).files for path in folders}
    return {name: {k: v for k, v in files.items() if k != TRAIN_STATE} for name, files in manifests.items()}


def events(run: Run, name: str) -> list[dict]:
    return [record for record in records(run, "event") if record["event"] == name]


def one_stage(run: Run) -> Run:
    stages = {"short": run.curriculum.stages["short"]}
    return replace(run, curriculum=replace(run.curriculum, stages=stages, order=["short"]))


def train_with_slow_disk(rank: int, run: Run) -> int:
    plan = {"point": "ckpt.after_shard_write", "kind": "slow", "seconds": 0.2, "times": 0}
    path = Path(f"{run.dir}.{rank}.json")
    path.write_text(json.dumps({"faults": [plan], "log": f"{run.dir}.{rank}.log"}))
    os.environ[PLAN_VARIABLE] = str(path)
    plan_from_environment()
    return train_rank(rank, run)


def test_a_run_that_saves_beside_training_is_the_same_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2)
    assert train_run(run) == [0, 0]
    expected = saved(run)
    checkpoint = Checkpoint(every_steps=2, keep=100, asynchronous=True)
    beside = replace(run, dir=str(tmp_path / "beside"), checkpoint=checkpoint)
    assert run_ranks(2, train_with_slow_disk, beside) == [0, 0]
    assert losses(beside) == losses(run)
    found = saved(beside)
    assert len(found) == len(events(beside, "checkpoint")) == 9
    assert {name: found[name] for name in expected} == expected


def train_with_a_disk_that_waits(rank: int, run: Run) -> int:
    """The first save is not written before the next one was due."""
    from k3train.checkpoint import writer

    as_it_is, metrics = writer.point, Path(run.dir) / METRICS

    def wait(name: str) -> None:
        as_it_is(name)
        while name == "ckpt.after_shard_write" and "checkpoint_skipped" not in metrics.read_text():
            time.sleep(0.05)

    writer.point = wait
    return train_rank(rank, run)


def test_a_save_that_is_due_too_early_is_left_out_when_asked(tmp_path: Path) -> None:
    run = one_stage(make_run(tmp_path, ranks=2))
    run.checkpoint = Checkpoint(every_steps=1, keep=100, asynchronous=True, when_busy=WhenBusy.skip)
    assert run_ranks(2, train_with_a_disk_that_waits, run) == [0, 0]
    left_out, found = events(run, "checkpoint_skipped"), saved(run)
    assert left_out
    assert len(left_out) + len(found) == 12
    assert "step_00000012" in found


@pytest.mark.parametrize("then", ["the next is due", "a step is too bad"])
def test_a_slow_disk_is_no_hang(tmp_path: Path, then: str) -> None:
    run = guarded_run(tmp_path, hang_floor_seconds=4, hang_ceiling_seconds=200)
    run.checkpoint = Checkpoint(every_steps=2, keep=100, asynchronous=True)
    slow = {"point": "ckpt.after_shard_write", "kind": "slow", "seconds": 25, "rank": 1, "step": 8}
    bad = {"point": "step.loss", "kind": "nan", "rank": 0, "step": 9, "times": 0}
    stops = then == "a step is too bad"
    one, other = train_with(run, [slow, bad] if stops else [slow])
    assert one == other
    assert one["code"] == (EXIT_BAD_STEP if stops else EXIT_DONE)
    assert "step_00000008" in saved(run)


def train_on_full_disk(rank: int, run: Run, *, room_after_failures: int) -> int | str:
    """Rank 1 can write no file over 20 kB until so many saves have failed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def make_room() -> None:
        while (
            not (Path(run.dir) / METRICS).exists()
            or len(events(run, "checkpoint_failed")) < room_after_failures
        ):
            time.sleep(0.05)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        threading.Thread(target=make_room, daemon=True).start()
    try:
        return train_rank(rank, run)
    except Unavailable as error:
        return str(error)


def test_training_goes_on_after_failed_saves_until_too_many(tmp_path: Path) -> None:
    run = one_stage(make_run(tmp_path, ranks=2))
    run.checkpoint = Checkpoint(every_steps=2, asynchronous=True, max_failures=3)
    for message in run_ranks(2, full_for_ever, run):
        assert "step_00000006 was not written" in message
        assert "File too large" in message
        assert f"free in {run.dir}/checkpoints" in message
        assert "3 saves in a row failed (checkpoint.max_failures = 3): the run ends" in message
    assert [each["step"] for each in events(run, "checkpoint_failed")] == [2, 4, 6]
    assert max(losses(run)) in (6, 7, 8)
    run.checkpoint = Checkpoint(every_steps=1, max_failures=100)
    assert run_ranks(2, full_at_first, run) == [0, 0]
    assert len(events(run, "checkpoint_failed")) >= 5
    assert "step_00000012" in saved(run)


def full_for_ever(rank: int, run: Run) -> int | str:
    return train_on_full_disk(rank, run, room_after_failures=10**6)


def full_at_first(rank: int, run: Run) -> int | str:
    return train_on_full_disk(rank, run, room_after_failures=5)
