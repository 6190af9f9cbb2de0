"""Injection points in a real run: each is reached, and a fault there does what its kind says."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

from k3train.config.schema import Run
from k3train.faults import PLAN_VARIABLE, POINTS, plan_from_environment
from tests.ranks import run_ranks
from tests.train.runs import losses, make_run, train_rank


def _train_under_plan(rank: int, run: Run, plan: str) -> int:
    os.environ[PLAN_VARIABLE] = plan
    plan_from_environment()
    return train_rank(rank, run)


def test_every_point_is_reached_and_waiting_there_changes_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2)
    run.curriculum.order = ["short"]
    run.checkpoint = replace(run.checkpoint, every_steps=3)
    plan, log = tmp_path / "plan.json", tmp_path / "log.jsonl"
    wait = {"kind": "slow", "seconds": 0, "times": 1}
    plan.write_text(json.dumps({"log": str(log), "faults": [{"point": name, **wait} for name in POINTS]}))
    for _ in range(2):  # the second start finds a checkpoint and verifies it
        assert run_ranks(2, _train_under_plan, run, str(plan)) == [0, 0]
    reached = [json.loads(line) for line in log.read_text().splitlines()]
    assert {each["point"] for each in reached} == set(POINTS)
    only_first = {each["point"] for each in reached} - {e["point"] for e in reached if e["rank"] == 1}
    assert only_first == {"ckpt.manifest", "ckpt.rename", "ckpt.pointer", "ckpt.mid_prune"}
    plain = replace(run, dir=str(tmp_path / "plain"))
    assert run_ranks(2, train_rank, plain) == [0, 0]
    assert losses(run) == losses(plain)
