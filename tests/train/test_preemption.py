"""Stopping at inconvenient moments: while evaluating, while saving, before the time limit."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from k3train.config.schema import Cluster, OnSpike, Run
from k3train.faults import PLAN_VARIABLE, plan_from_environment
from k3train.train.signals import StopRequest
from tests.ranks import run_ranks
from tests.train.runs import losses, make_run, records, train_rank, train_run
from tests.train.test_guards import guarded_run, spike_in_step


def _stopped_while_evaluating_and_while_saving(rank: int, run: Run) -> list[int]:
    """Two starts; a real SIGUSR1 arrives at one rank in the middle of an evaluation, then of a save."""
    from k3train.train import evaluate
    from k3train.train.saving import Saver

    sent: list[int] = []
    measure, save = evaluate._heldout_loss, Saver.save

    def usr1(at: int, step: int) -> None:
        if rank == 1 and step == at and at not in sent:
            sent.append(at)
            os.kill(os.getpid(), signal.SIGUSR1)

    def measured(*arguments):
        usr1(6, 6 if (Path(run.dir) / "checkpoints" / "step_00000004").exists() else 0)
        return measure(*arguments)

    def saved(saver, setup, progress, **how):
        usr1(8, progress.step)
        return save(saver, setup, progress, **how)

    evaluate._heldout_loss, Saver.save = measured, saved
    return [train_rank(rank, run), train_rank(rank, run)]


def test_a_stop_while_evaluating_or_saving_is_carried_out_there(tmp_path: Path) -> None:
    golden = make_run(tmp_path, ranks=2, dir=str(tmp_path / "golden"))
    assert train_run(golden) == [0, 0]
    run = make_run(tmp_path, ranks=2)
    run.curriculum.eval_every_steps = 6
    assert run_ranks(2, _stopped_while_evaluating_and_while_saving, run) == [[75, 75]] * 2
    events = [(e["event"], e["step"]) for e in records(run, "event")]
    assert ("evaluation_stopped", 6) in events
    assert [step for event, step in events if event == "stop"] == [6, 8], "no step was trained after either"
    assert [e["step"] for e in records(run, "eval")] == [0]
    assert train_run(run) == [0, 0]
    assert losses(run) == losses(golden)


def _with_a_day_to_go_back(rank: int, run: Run) -> float:
    """Time kept free before the limit after a run in which finding checkpoints takes a day by its clock."""
    from k3train.train import loop

    os.environ[PLAN_VARIABLE] = f"{run.dir}-plan.json"
    plan_from_environment()
    days, find = [0], loop.find_progress
    made: list[StopRequest] = []

    def request(*arguments, **options) -> StopRequest:
        made.append(StopRequest(*arguments, clock=lambda: time.monotonic() + days[0] * 86_400, **options))
        return made[0]

    def a_day_later(run: Run):
        days[0] += 1
        return find(run)

    loop.StopRequest, loop.find_progress = request, a_day_later
    assert train_rank(rank, run) == 0
    assert days[0] == 2
    return made[0].needed_seconds()


def test_the_way_back_from_a_spike_counts_as_no_step(tmp_path: Path) -> None:
    run = guarded_run(tmp_path, every_steps=5, spike=OnSpike.rollback, rollback_steps=4)
    Path(f"{run.dir}-plan.json").write_text(json.dumps({"faults": [spike_in_step(11)]}))
    assert max(run_ranks(2, _with_a_day_to_go_back, run)) < 3600


def test_slurm_s_end_of_the_job_is_kept_without_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(ranks_per_node=2, collective_timeout_seconds=60, stop_margin_seconds=3600)
    run = make_run(tmp_path, ranks=2, cluster=cluster)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 3000))
    assert train_run(run) == [75, 75]
    (stop,) = [e for e in records(run, "event") if e["event"] == "stop"]
    assert (stop["step"], stop["detail"]["reason"]) == (1, "the time limit is near")
    assert (tmp_path / "run" / "checkpoints" / "step_00000001").is_dir()
