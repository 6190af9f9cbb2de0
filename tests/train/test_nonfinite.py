"""An update that makes NaN, in real runs of two ranks: no checkpoint holds it and no good one goes for it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from k3train.checkpoint.finite import NotFinite
from k3train.config.schema import Checkpoint, Guards, OnNonFinite, Parallel, Precision, Run, Stage
from k3train.faults import PLAN_VARIABLE, plan_from_environment
from k3train.train.signals import EXIT_BAD_STEP
from tests.ranks import run_ranks
from tests.train.runs import make_run, records, train_rank, train_run

STEPS = 8


def run_of(folder: Path, *, every_steps: int = 1, asynchronous: bool = False) -> Run:
    """Eight steps on two ranks that share the experts; a bad step is skipped and never stops the run."""
    run = make_run(folder, ranks=2)
    run.model.num_layers = 3
    run.model.precision = Precision.bf16
    run.curriculum.stages = {"short": Stage(context_tokens=64, tokens=STEPS * 256, batch_tokens=256)}
    run.curriculum.order, run.curriculum.eval_tokens = ["short"], 64
    run.parallel = Parallel(ep=2)
    run.checkpoint = Checkpoint(every_steps=every_steps, asynchronous=asynchronous, keep=2)
    run.guards = Guards(nonfinite=OnNonFinite.skip)
    return run


def train_with(run: Run, **fault: Any) -> list[tuple[int, str]]:
    """Exit code of each rank, and what it says, when this fault happens."""
    plan = Path(f"{run.dir}-plan.json")
    plan.write_text(json.dumps({"faults": [fault], "log": f"{run.dir}-log"}))
    return run_ranks(2, _train, run, str(plan))


def _train(rank: int, run: Run, plan: str) -> tuple[int, str]:
    os.environ[PLAN_VARIABLE] = plan
    plan_from_environment()
    try:
        return train_rank(rank, run), ""
    except NotFinite as error:
        return error.exit_code, str(error)


def kept(run: Run) -> list[str]:
    return sorted(path.name for path in (Path(run.dir) / "checkpoints").glob("step_*"))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("point", "tensor"), [("step.weights", "experts"), ("step.moments", "exp_avg_sq")])
def test_a_state_that_is_not_finite_is_never_a_checkpoint(
    tmp_path: Path, point: str, tensor: str, asynchronous: bool
) -> None:
    run = run_of(tmp_path, asynchronous=asynchronous)
    one, other = train_with(run, point=point, kind="nan", rank=1, step=5, tensor=tensor)
    assert one == other
    code, message = one
    assert code == EXIT_BAD_STEP
    assert "after step 5 " in message
    assert tensor in message
    assert "on rank 1: no checkpoint of it is written" in message
    assert kept(run) == ["step_00000003", "step_00000004"]
    assert train_run(run) == [0, 0]
    assert records(run, "event")[-1]["event"] == "finished"
    assert kept(run)[-1] == "step_00000008"


def test_a_last_update_that_is_not_finite_fails_the_run(tmp_path: Path) -> None:
    run = run_of(tmp_path, every_steps=4)
    codes = train_with(run, point="step.weights", kind="nan", rank=0, step=STEPS)
    assert [code for code, _ in codes] == [EXIT_BAD_STEP] * 2
    assert "finished" not in [event["event"] for event in records(run, "event")]
    assert kept(run) == ["step_00000004"]


def test_a_heldout_loss_that_is_not_finite_fails_the_run(tmp_path: Path) -> None:
    """The state is good here; what was being saved beside training is kept."""
    run = run_of(tmp_path, every_steps=7, asynchronous=True)
    in_evaluation = {"occurrence": 3, "times": 0}  # each rank has two micro-batches a step
    codes = train_with(run, point="step.loss", kind="nan", rank=1, step=STEPS, **in_evaluation)
    assert codes == [(EXIT_BAD_STEP, codes[0][1])] * 2
    assert "held-out loss on heldout is nan" in codes[0][1]
    assert "finished" not in [event["event"] for event in records(run, "event")]
    assert kept(run) == ["step_00000007"]
    assert train_run(run) == [0, 0]
