"""The debug curriculum in small: what stages hand over, under kills at every border, and edited under way."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from k3train.checkpoint.listing import committed, last_trained
from k3train.checkpoint.load import read_train_state
from k3train.config.compare import settle
from k3train.config.compose import compose
from k3train.config.problems import ConfigError
from k3train.config.schema import Checkpoint, Curriculum, Mtp, Run, Stage, StageLearningRate, StageParallel
from k3train.config.trained import Trained
from k3train.curriculum.stages import stage_table
from k3train.faults import PLAN_VARIABLE, plan_from_environment
from tests.history import read_history
from tests.ranks import RanksFailed, run_ranks
from tests.train.runs import VOCAB, losses, make_run, records, train_rank, train_run


def debug_in_small(folder: Path, **changes: object) -> Run:
    """The debug curriculum's four stages with their layouts, at 1/8 of their length and 4, 3, 2, 2 steps."""
    debug = compose(["experiment=debug"]).curriculum
    stages = {}
    for name, steps in zip(debug.order, (4, 3, 2, 2), strict=True):
        stage = debug.stages[name]
        stages[name] = replace(
            stage,
            context_tokens=stage.context_tokens // 8,
            batch_tokens=max(stage.batch_tokens // 8, 2 * stage.context_tokens // 8),
            tokens=steps * max(stage.batch_tokens // 8, 2 * stage.context_tokens // 8),
        )
    stages["s8192"].learning_rate = StageLearningRate(warmup_tokens=stages["s8192"].batch_tokens)
    curriculum = Curriculum(stages=stages, order=debug.order, eval_tokens=512)
    return make_run(folder, ranks=2, curriculum=curriculum, **changes)


def _train_with_faults(rank: int, run: Run, plan: str) -> int:
    os.environ[PLAN_VARIABLE] = plan
    plan_from_environment()
    return train_rank(rank, run)


def test_killed_at_every_border_it_repeats_the_uninterrupted_run_bit_for_bit(tmp_path: Path) -> None:
    golden = debug_in_small(tmp_path, dir=str(tmp_path / "golden"))
    assert train_run(golden) == [0, 0]
    run = debug_in_small(tmp_path)
    ends = [plan.end_step for plan in stage_table(run)]
    plan = tmp_path / "faults.json"
    borders = (
        {"point": "eval.batch", "step": ends[0]},  # the stage is trained; its last checkpoint is not written
        {"point": "ckpt.pointer", "step": ends[1], "rank": 0},  # written; the next stage is not built
        {"point": "setup.built", "step": ends[2]},  # built in another layout; nothing is loaded
        {"point": "ckpt.shard", "step": ends[3]},  # the last stage's own end
    )
    for border in borders:
        plan.write_text(json.dumps({"faults": [{"rank": 1, "kind": "kill", **border}]}))
        with contextlib.suppress(RanksFailed):
            run_ranks(2, _train_with_faults, run, str(plan))
            pytest.fail(f"no kill at {border}")
    assert train_run(run) == [0, 0]
    seen = [(r["step"], r["loss"], r["learning_rate"]) for r in records(run, "step")]
    expected = {r["step"]: (r["loss"], r["learning_rate"]) for r in records(golden, "step")}
    assert {step for step, _, _ in seen} == set(expected) == set(range(1, ends[-1] + 1))
    assert [(step, loss) for step, loss, rate in seen if (loss, rate) != expected[step]] == []
    attempts = {r["attempt"] for r in records(run, "step")}
    assert len(attempts) > 3, "the kills came one start after the other"

    first, again = (_milestones(each) for each in (golden, run))
    assert first.keys() == again.keys() == set(ends)
    for step, state in first.items():
        for key in ("tokens", "stage", "bends", "data"):
            assert state[key] == again[step][key], (step, key)
    positions = [first[step]["data"]["positions"]["counting"] for step in ends]
    drawn = [epoch * 10**9 + offset - returned for epoch, offset, returned in positions]
    assert drawn == sorted(set(drawn)), "each stage goes on where the one before ended"
    assert {entry["run_id"] for entry in read_history(Path(run.dir)) if entry["event"] == "start"} == {
        (Path(run.dir) / "run_id").read_text().strip()
    }


def _milestones(run: Run) -> dict[int, dict]:
    """The train state of each stage's last checkpoint."""
    ends = {plan.end_step for plan in stage_table(run)}
    found = committed(Path(run.dir) / "checkpoints")
    return {step: read_train_state(path) for step, path in found if step in ends}


def test_a_run_is_edited_under_way_and_its_past_stays(tmp_path: Path) -> None:
    """Finished, then lengthened; a stage of new text is added behind; the seed is changed on purpose."""
    run = make_run(tmp_path, curriculum=_two_stages(4, None))
    settle(run, tmp_path / "run" / "run.yaml", Trained())
    assert train_run(run) == [0]
    before = losses(run)
    longer = make_run(tmp_path, curriculum=_two_stages(6, 2))
    settle(longer, tmp_path / "run" / "run.yaml", last_trained(tmp_path / "run"))
    assert train_run(longer) == [0]
    after = losses(longer)
    assert {step: after[step] for step in before} == before
    assert sorted(after) == list(range(1, 9))
    rates = {r["step"]: r["learning_rate"] for r in records(longer, "step")}
    floor = run.optim.min_learning_rate
    assert rates[4] == rates[5] == rates[8] == floor, "it had ended at the floor and goes on from there"
    (settings,) = [e for e in read_history(tmp_path / "run") if e["event"] == "settings"]
    assert settings["changed"]["curriculum.stages.short.tokens"] == [4 * 512, 6 * 512]

    reseeded = replace(make_run(tmp_path, curriculum=_two_stages(6, 4)), seed=7)
    with pytest.raises(RanksFailed, match=r"seed = 7 was 1234"):
        train_run(reseeded)
    reseeded.resume.override = ["seed"]
    assert train_run(reseeded) == [0]
    start = [e for e in records(reseeded, "event") if e["event"] == "start"][-1]
    assert start["detail"]["override"] == ["seed"]
    assert start["detail"]["changed_versions"] == {}


def test_a_finished_run_whose_last_checkpoint_is_cut_trains_its_last_steps_again(tmp_path: Path) -> None:
    run = make_run(tmp_path, curriculum=_two_stages(4, None), checkpoint=Checkpoint(every_steps=3))
    settle(run, tmp_path / "run" / "run.yaml", Trained())
    assert train_run(run) == [0]
    (newest, path), (older, _) = committed(tmp_path / "run" / "checkpoints")
    file = next(path.glob("*.distcp"))
    os.truncate(file, file.stat().st_size - 1)
    changed = replace(run, optim=replace(run.optim, weight_decay=0.2))
    settled = settle(changed, tmp_path / "run" / "run.yaml", last_trained(tmp_path / "run"))
    assert (settled.all_trained, [each.key for each in settled.accepted]) == (0, ["optim.weight_decay"])
    assert train_run(changed) == [0]
    steps = [record["step"] for record in records(changed, "step")]
    assert steps == [*range(1, newest + 1), *range(older + 1, newest + 1)]
    assert last_trained(tmp_path / "run").steps == newest


def test_a_stage_goes_on_with_another_batch_where_it_stands(tmp_path: Path) -> None:
    """Stopped in the middle; tokens tell the place, whatever the size of the steps that led there."""

    def edited(name: str, batch: int, more: int = 0) -> Run:
        curriculum = _two_stages(8, 2 + more)
        curriculum.stages["short"].batch_tokens = batch
        changes = {"curriculum": curriculum, "checkpoint": Checkpoint(every_steps=2, keep=9)}
        run = make_run(tmp_path, dir=str(tmp_path / name), **changes)
        run.resume.override = [] if name == "whole" else ["curriculum.stages.short.batch_tokens"]
        return run

    def settle_again(run: Run) -> None:
        settle(run, Path(run.dir) / "run.yaml", last_trained(Path(run.dir)))

    whole = edited("whole", 512)
    settle_again(whole)
    assert train_run(whole) == [0]
    golden = read_train_state(committed(tmp_path / "whole" / "checkpoints")[0][1])
    for batch, steps in ((1024, 4 + 2), (256, 4 + 8)):
        run = edited(f"by {batch}", batch)
        shutil.copytree(whole.dir, run.dir)
        for step, path in committed(Path(run.dir) / "checkpoints"):
            if step > 4:
                shutil.rmtree(path)
        settle_again(run)
        assert train_run(run) == [0]
        state = read_train_state(committed(Path(run.dir) / "checkpoints")[0][1])
        assert (state["step"], state["tokens"]) == (steps + 2, golden["tokens"])
        for key in ("consumed_tokens", "positions"):
            assert state["data"][key] == golden["data"][key], key
        lengthened = edited(f"by {batch}", batch, more=1)  # both stages have begun
        lengthened.resume.override = []
        settle_again(lengthened)
        assert train_run(lengthened) == [0]
        assert committed(Path(run.dir) / "checkpoints")[0][0] == steps + 3

    refused = edited("whole", 3 * 512)
    for step, path in committed(tmp_path / "whole" / "checkpoints"):
        if step > 4:
            shutil.rmtree(path)
    refused.resume.override = ["curriculum"]
    refused.curriculum.stages["short"].tokens = 6 * 3 * 512
    with pytest.raises(ConfigError, match=r"short.batch_tokens = 1536 does not divide the 2048 tokens"):
        settle_again(refused)


def test_a_stage_weighs_the_mtp_loss_and_reports_it_beside_the_next_token_s(tmp_path: Path) -> None:
    first = {}
    for weight in (None, 0.3):
        curriculum = _two_stages(1, None)
        curriculum.stages["short"].mtp_loss_weight = weight
        run = make_run(tmp_path, curriculum=curriculum, dir=str(tmp_path / f"weight {weight}"))
        run.model.mtp = Mtp(num_layers=1, loss_weight=0.1)
        assert train_run(run) == [0]
        (first[weight],) = records(run, "step")
    assert first[0.3]["loss"] == first[None]["loss"] == pytest.approx(math.log(VOCAB), rel=0.15)
    for step in first.values():
        assert step["mtp_loss"] == pytest.approx(math.log(VOCAB), rel=0.15)
    assert first[0.3]["grad_norm"] > first[None]["grad_norm"]


def _two_stages(first: int, second: int | None) -> Curriculum:
    stages = {"short": Stage(context_tokens=128, tokens=first * 512, batch_tokens=512)}
    if second is not None:
        stages["long"] = Stage(
            context_tokens=256, tokens=second * 512, batch_tokens=512, parallel=StageParallel()
        )
    return Curriculum(stages=stages, order=list(stages), eval_tokens=256)
