"""Slow and hung ranks, and bits that change where nothing may change them, in real runs of two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from k3train.config.schema import Guards, Parallel
from k3train.train.replicas import Damage, Fingerprint, odd_replicas
from tests.ranks import RanksFailed, run_ranks
from tests.train.runs import records
from tests.train.test_guards import found, guarded_run, train_with


def test_slow_rank_is_named_and_a_hung_one_ends_the_run_with_all_stacks(tmp_path: Path) -> None:
    run = guarded_run(
        tmp_path, every_steps=4, straggler_every_steps=1, hang_floor_seconds=10, hang_ceiling_seconds=200
    )
    with pytest.raises(RanksFailed, match=r"rank \d ended with 18"):
        train_with(
            run,
            [
                {"point": "step.forward", "kind": "slow", "rank": 1, "times": 0, "seconds": 0.5},
                {"point": "data.next", "kind": "hang", "rank": 0, "step": 6, "seconds": 300},
            ],
        )
    events = {event["event"]: event for event in records(run, "event")}
    assert events["straggler"]["detail"]["rank"] == 1
    assert 3 <= events["straggler"]["step"] <= 6
    assert records(run, "step")[-1]["slowest_rank"] is not None

    (folder,) = (Path(run.dir) / "stacks").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == [
        "rank_00000.txt",
        "rank_00001.txt",
        "summary.txt",
    ]
    assert (folder / "summary.txt").read_text().startswith("rank 0 on ")
    assert "faults.py" in (folder / "summary.txt").read_text()
    stacks = [(folder / f"rank_{rank:05d}.txt").read_text() for rank in (0, 1)]
    assert "in train_stage" in stacks[0]
    assert "in train_step" in stacks[1]
    assert "watchdog.py" in stacks[1]
    assert events["hung"]["detail"]["stacks"] == str(folder)
    assert events["hung"]["step"] == 7

    # While checkpoints are verified there is no experience, but the peer's collective has its own timeout.
    run.guards = Guards()
    run.cluster.collective_timeout_seconds = 30
    with pytest.raises(RanksFailed, match=r"rank \d ended with 18"):
        train_with(run, [{"point": "ckpt.verify", "kind": "hang", "rank": 0, "seconds": 300}])
    (again,) = set((Path(run.dir) / "stacks").iterdir()) - {folder}
    summary = (again / "summary.txt").read_text()
    assert summary.startswith("rank 0 on ")
    assert "s in verification of step 0, at " in summary


@pytest.mark.parametrize(
    ("point", "tensor", "rank"), [("step.weights", "layers.1", 1), ("step.moments", "exp_avg", 0)]
)
def test_flipped_bit_is_found_before_it_is_used(tmp_path: Path, point: str, tensor: str, rank: int) -> None:
    run = guarded_run(tmp_path, digest_every_steps=1)
    flip = {"point": point, "kind": "flip", "tensor": tensor, "rank": rank, "step": 2, "bit": 0}
    one, other = train_with(run, [flip])
    assert one == other
    assert one["code"] == 16
    assert f"rank {rank}: {tensor}" in one["message"]
    assert one["seen"][-1] == (3, "stop", True)
    assert found(run)[3]["suspects"] == [rank]
    assert json.loads(Path(found(run)[3]["record"]).read_text())["ranks"] == [rank]


def test_tensor_parallel_replica_that_drifted_is_found_at_the_next_comparison(tmp_path: Path) -> None:
    run = guarded_run(tmp_path, digest_every_steps=4)
    run.parallel = Parallel(tp=2)
    flip = {"point": "step.weights", "kind": "flip", "tensor": "norm", "rank": 1, "step": 5, "bit": 12}
    one, other = train_with(run, [flip])
    assert one == other
    assert one["code"] == 16
    assert one["seen"][-1][:2] == (8, "stop")
    assert "one of ranks 0 and 1: " in found(run)[8]["found"]


def _compare(rank: int) -> Damage | None:
    world = dist.group.WORLD
    alone = dist.new_group([rank], use_local_synchronization=True)
    groups = SimpleNamespace(pg=SimpleNamespace(dp_cp=world, tp=alone, expt_dp=alone), tokens=world)
    setup = SimpleNamespace(groups=groups, device=torch.device("cpu"))
    own = Fingerprint(
        names=["equal", "odd", "bias", "own"],
        values=[-(2**63), 2**63 - 1 - (rank == 2), 7, rank],
        axes=[("dp_cp", "tp"), ("dp_cp",), ("tokens",), ()],
    )
    return odd_replicas(setup, own)  # pyright: ignore[reportArgumentType]


def test_majority_names_the_odd_rank() -> None:
    assert run_ranks(3, _compare) == [Damage([2], ["odd"])] * 3
