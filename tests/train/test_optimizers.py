"""Whole runs with other optimizers than the default: killed, they repeat the uninterrupted run."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from k3train.checkpoint.listing import committed
from k3train.checkpoint.manifest import read_manifest
from k3train.checkpoint.stage import TRAIN_STATE
from k3train.config.schema import Checkpoint, Guards, Offload, Optim, Optimizer, QkClip, Run
from k3train.faults import PLAN_VARIABLE, plan_from_environment
from k3train.optim.offload import host_adam
from tests.ranks import RanksFailed, run_ranks
from tests.train.runs import losses, make_run, records, train_rank, train_run
from tests.with_deepspeed import with_deepspeed

KILLS = ({"point": "ckpt.shard", "step": 6}, {"point": "step.moments", "step": 9})
"""While the first stage's last checkpoint is written, and after a step in the second stage's layout."""


def _run(folder: Path, **changes: object) -> Run:
    """Six steps on dp 2 and four on cp 2, with a checkpoint after every second."""
    run = make_run(folder, ranks=2, checkpoint=Checkpoint(every_steps=2), **changes)
    run.curriculum.stages["short"].tokens = 6 * 512
    run.curriculum.stages["long"].tokens = 4 * 512
    run.curriculum.eval_tokens = 256
    return run


def _with_faults(rank: int, run: Run, plan: str) -> int:
    os.environ[PLAN_VARIABLE] = plan
    plan_from_environment()
    return train_rank(rank, run)


def _killed_and_resumed(run: Run, folder: Path) -> None:
    plan = folder / "faults.json"
    for kill in KILLS:
        plan.write_text(json.dumps({"faults": [{"rank": 1, "kind": "kill", **kill}]}))
        with contextlib.suppress(RanksFailed):
            run_ranks(2, _with_faults, run, str(plan))
            pytest.fail(f"no kill at {kill}")
    assert train_run(run) == [0, 0]


def _last_checkpoint(run: Run) -> dict[str, str]:
    """Digests of every tensor file of the newest checkpoint."""
    newest = max(committed(Path(run.dir) / "checkpoints"))[1]
    files = read_manifest(newest).files
    return {name: str(entry) for name, entry in files.items() if name != TRAIN_STATE}


def _check_same(run: Run, golden: Run) -> None:
    seen = [(r["step"], r["loss"], r["grad_norm"]) for r in records(run, "step")]
    expected = {r["step"]: (r["loss"], r["grad_norm"]) for r in records(golden, "step")}
    assert {step for step, *_ in seen} == set(expected) == set(range(1, 11))
    assert [each for each in seen if each[1:] != expected[each[0]]] == []
    assert len({r["attempt"] for r in records(run, "step")}) == 3
    assert _last_checkpoint(run) == _last_checkpoint(golden)


def test_muon_with_qk_clip_goes_on_bit_for_bit(tmp_path: Path) -> None:
    clip = QkClip(enabled=True, threshold=0.01)
    optim = Optim(optimizer=Optimizer.muon, qk_clip=clip, learning_rate=1e-2, min_learning_rate=1e-3)
    golden = _run(tmp_path, optim=optim, dir=str(tmp_path / "golden"))
    assert train_run(golden) == [0, 0]
    clipped = [r["max_logit"] > clip.threshold for r in records(golden, "step")]
    assert sum(clipped) > 5
    run = replace(golden, dir=str(tmp_path / "run"))
    _killed_and_resumed(run, tmp_path)
    _check_same(run, golden)


@with_deepspeed
def test_offload_trains_as_the_device_does_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    host_adam()  # ranks are forked with it
    device = _run(tmp_path, guards=Guards(digest_every_steps=1), dir=str(tmp_path / "device"))
    assert train_run(device) == [0, 0]
    golden = replace(device, dir=str(tmp_path / "golden"), optim=replace(device.optim, offload=Offload.cpu))
    assert train_run(golden) == [0, 0]
    on_device = losses(device)
    for step, loss in losses(golden).items():
        assert loss == pytest.approx(on_device[step], rel=1e-4), step
    assert losses(golden) != on_device, "another program"
    run = replace(golden, dir=str(tmp_path / "run"))
    _killed_and_resumed(run, tmp_path)
    _check_same(run, golden)
