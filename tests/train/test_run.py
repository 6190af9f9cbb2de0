"""Whole runs: stages, hand-over between layouts, stopping, killing and going on."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from pathlib import Path

import pytest

from k3train.config.schema import Run
from tests.ranks import RanksFailed, run_ranks
from tests.train.runs import losses, make_run, records, train_rank, train_run


def test_one_rank_learns_through_both_stages(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert train_run(run) == [0]
    steps = losses(run)
    assert sorted(steps) == list(range(1, 19))
    evals = records(run, "eval")
    assert [(e["step"], e["stage"], e["context_tokens"]) for e in evals] == [
        (0, "short", 128),
        (12, "short", 128),
        (12, "short", 256),
        (18, "long", 256),
    ]
    assert steps[1] > 4.0
    assert evals[-1]["loss"] < steps[1] - 1.0


def test_two_ranks_hand_over_from_data_to_context_parallel(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2)
    assert train_run(run) == [0, 0]
    started = [e["detail"] for e in records(run, "event") if e["event"] == "stage_start"]
    assert [e["pipeline"]["message_bytes"] for e in started] == [0, 0]
    starts = [e["layout"] for e in started]
    assert [(layout["dp"], layout["cp"]) for layout in starts] == [(2, 1), (1, 2)]
    alone = make_run(tmp_path, dir=str(tmp_path / "alone"))
    assert train_run(alone) == [0]
    for step, loss in losses(alone).items():
        assert abs(losses(run)[step] - loss) < 2e-4 * loss, step


def _train_and_die(rank: int, run: Run, after_seconds: float) -> int:
    if rank == 1:
        threading.Timer(after_seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return train_rank(rank, run)


def test_killed_at_random_moments_it_repeats_the_uninterrupted_run_bit_for_bit(tmp_path: Path) -> None:
    golden = make_run(tmp_path, ranks=2, dir=str(tmp_path / "golden"))
    train_run(golden)
    run = make_run(tmp_path, ranks=2)
    rng = random.Random()
    for _ in range(4):
        # A run that ends before its time to die is a run without a fault, which proves nothing wrong either.
        with contextlib.suppress(RanksFailed):
            run_ranks(2, _train_and_die, run, rng.uniform(0.5, 6.0))
    assert train_run(run) == [0, 0]
    seen = [(r["step"], r["loss"]) for r in records(run, "step")]
    expected = losses(golden)
    assert {step for step, _ in seen} == set(expected)
    assert [(step, loss) for step, loss in seen if loss != expected[step]] == []


def _train_until_asked(rank: int, run: Run) -> int:
    from k3train.train import loop

    as_it_is = loop.train_step

    def train_step(setup, progress, host, **options):
        if (rank, progress.step) == (1, 4):
            os.kill(os.getpid(), signal.SIGTERM)
        return as_it_is(setup, progress, host, **options)

    loop.train_step = train_step
    return train_rank(rank, run)


@pytest.mark.slow
def test_sigterm_to_one_rank_saves_on_all_and_the_run_goes_on(tmp_path: Path) -> None:
    golden = make_run(tmp_path, ranks=2, dir=str(tmp_path / "golden"))
    train_run(golden)
    run = make_run(tmp_path, ranks=2)
    codes = run_ranks(2, _train_until_asked, run)
    assert codes == [75, 75]
    stopped = max(losses(run))
    assert stopped == 6, "asked within step 5, which ranks agree on in the next"
    assert train_run(run) == [0, 0]
    assert losses(run) == losses(golden)
    again = [r["step"] for r in records(run, "step") if r["attempt"] == 2]
    assert again == list(range(stopped + 1, 19))
