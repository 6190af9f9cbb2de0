"""What asks a run to stop, and when the time limit counts as near."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from k3train.config.schema import Cluster, Run
from k3train.train.claim import STOP_FILE
from k3train.train.signals import END_TIME, StopRequest, seconds_left
from tests.ranks import run_ranks

TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limited(tmp_path: Path, clock: Clock) -> Iterator[StopRequest]:
    stop = StopRequest(tmp_path, seconds_left=100.0, margin_seconds=10.0, clock=clock)
    yield stop
    stop.restore()


def test_the_floor_alone_counts_before_anything_was_measured(limited: StopRequest, clock: Clock) -> None:
    assert not limited.poll()
    clock.now += 90.0
    with limited.pause():
        pass
    clock.now += 0.5
    assert limited.poll()
    assert limited.reason == "the time limit is near"


def test_the_margin_is_what_the_longest_step_and_the_longest_save_have_taken(
    limited: StopRequest, clock: Clock
) -> None:
    for seconds in (1.0, 5.0, 2.0):
        assert not limited.poll()
        clock.now += seconds  # a step
        with limited.pause():
            clock.now += 4 * seconds  # a save
    assert limited.needed_seconds() == 10.0 + 2 * 5.0 + 20.0
    clock.now = 1000.0 + 100.0 - 40.0
    assert not limited.poll()
    clock.now += 0.1
    assert limited.poll()


def test_of_an_evaluation_one_pass_is_kept_free_not_all(limited: StopRequest, clock: Clock) -> None:
    limited.poll()
    clock.now += 3.0  # a step
    with limited.pause():
        clock.now += 4.0  # a save
    for seconds in (2.0, 7.0):
        with limited.pause("pass"):
            for _ in range(4):
                assert not limited.poll()
                clock.now += seconds
        assert not limited.poll()
        clock.now += 1.0
        # The pass or step in progress, one step more, and the save.
        assert limited.needed_seconds() == 10.0 + max(3.0, seconds) + 3.0 + 4.0


def test_a_wall_clock_that_jumps_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = StopRequest(tmp_path, seconds_left=3600.0)
    try:
        monkeypatch.setattr(time, "time", lambda: 4e9)
        assert not stop.poll()
        assert stop.needed_seconds() < 60
    finally:
        stop.restore()


@pytest.mark.parametrize("number", [TERM, USR1])
def test_signals_are_remembered(tmp_path: Path, number: signal.Signals) -> None:
    stop = StopRequest(tmp_path)
    try:
        assert not stop.poll()
        os.kill(os.getpid(), number)
        assert stop.poll()
        assert stop.reason == number.name
        os.kill(os.getpid(), USR1)  # repeated by a launcher: no reason to die
        assert stop.poll()
    finally:
        stop.restore()
    assert signal.getsignal(TERM) is signal.SIG_DFL


def _clear(rank: int, folder: Path) -> bool:
    """Whether the file is there after rank 1, and only it, has cleared it."""
    stop = StopRequest(folder)
    if rank == 1:
        stop.clear_file()
    dist.barrier()
    kept = (folder / STOP_FILE).exists()
    dist.barrier()
    if rank == 0:
        stop.clear_file()
    stop.restore()
    return kept


def test_only_rank_0_clears_the_stop_file(tmp_path: Path) -> None:
    (tmp_path / STOP_FILE).touch()
    assert run_ranks(2, _clear, tmp_path) == [True, True]
    assert not (tmp_path / STOP_FILE).exists()


def test_the_stop_file_is_obeyed_and_cleared(tmp_path: Path) -> None:
    stop = StopRequest(tmp_path)
    try:
        assert not stop.poll()
        (tmp_path / STOP_FILE).touch()
        assert stop.poll()
        assert stop.reason == f"{tmp_path / STOP_FILE} exists"
        stop.clear_file()
        assert not (tmp_path / STOP_FILE).exists()
    finally:
        stop.restore()


def test_the_time_limit_comes_from_slurm_the_launcher_or_the_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("SLURM_JOB_END_TIME", END_TIME):
        monkeypatch.delenv(name, raising=False)
    run = Run(cluster=Cluster(time_limit_minutes=5))
    assert seconds_left(Run()) is None
    assert seconds_left(run) == 300.0
    monkeypatch.setattr(time, "time", lambda: 10_000.0)
    monkeypatch.setenv(END_TIME, "10200")
    assert seconds_left(run) == 200.0
    assert seconds_left(Run()) == 200.0
    monkeypatch.setenv("SLURM_JOB_END_TIME", "10600")
    assert seconds_left(run) == 300.0
    assert seconds_left(Run()) == 600.0
    monkeypatch.setenv("SLURM_JOB_END_TIME", "Unknown")
    assert seconds_left(run) == 200.0
