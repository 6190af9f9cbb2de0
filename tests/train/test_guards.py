"""Bad steps in real runs of two ranks: seen before the optimizer steps, dealt with alike on every rank."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from k3train.checkpoint.load import read_train_state
from k3train.config.schema import Checkpoint, Guards, OnNonFinite, OnSpike, Parallel, Run, Stage
from k3train.faults import PLAN_VARIABLE, plan_from_environment
from k3train.train.left_out import LEFT_OUT
from tests.ranks import RanksFailed, run_ranks
from tests.train.runs import losses, make_run, records, train_rank

STEPS = 14
KINDS = ("nonfinite", "spike", "replay", "damage", "replicas")


def guarded_run(folder: Path, name: str = "run", *, every_steps: int = 0, **guards: Any) -> Run:
    """One stage of 14 steps on two ranks that share the experts, two micro-batches each."""
    run = make_run(folder, ranks=2, dir=str(folder / name))
    run.model.num_layers = 3
    run.curriculum.stages = {"short": Stage(context_tokens=64, tokens=STEPS * 256, batch_tokens=256)}
    run.curriculum.eval_tokens = 64
    run.curriculum.order = ["short"]
    run.parallel = Parallel(ep=2)
    run.checkpoint = Checkpoint(every_steps=every_steps)
    run.guards = Guards(**guards)
    return run


def train_with(run: Run, faults: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each rank saw while training under these faults."""
    plan = Path(f"{run.dir}-plan.json")
    plan.write_text(json.dumps({"faults": faults, "log": f"{run.dir}-log"}))
    return run_ranks(2, _train, run, str(plan))


def _train(rank: int, run: Run, plan: str) -> dict[str, Any]:
    os.environ[PLAN_VARIABLE] = plan
    plan_from_environment()
    from k3train.train import loop
    from k3train.train.verdict import TrainingError

    seen: list[tuple[int, str, bool]] = []
    step_as_it_is = loop.train_step

    def train_step(setup, progress, host, **options):
        before, number = _state(setup), progress.step + 1
        result = step_as_it_is(setup, progress, host, **options)
        seen.append((number, result.action.value, _state(setup) == before))
        return result

    loop.train_step = train_step
    try:
        return {"code": train_rank(rank, run), "seen": seen, "message": ""}
    except TrainingError as error:
        return {"code": error.exit_code, "seen": seen, "message": str(error)}


def _state(setup) -> list[int]:
    """Digests of everything that training changes on this rank, except its position."""
    from k3train.optim.build import optimizer_steps
    from k3train.train.digest import digests
    from k3train.train.setup import moments, weights

    buffers = [buffer for chunk in setup.chunks for buffer in chunk.module.buffers()]
    named = [*weights(setup.chunks), *moments(setup.optimizer)]
    return [*digests([tensor for _, tensor in named]), *digests(buffers), optimizer_steps(setup.optimizer)]


def found(run: Run) -> dict[int, dict[str, Any]]:
    """Findings by the number of their step."""
    events = [e for e in records(run, "event") if e["event"] in KINDS]
    return {event["step"]: event["detail"] for event in events}


def test_bad_steps_are_skipped_everywhere_and_a_restart_skips_them_too(tmp_path: Path) -> None:
    run = guarded_run(tmp_path, nonfinite=OnNonFinite.skip, spike=OnSpike.skip)
    always = {"times": 0}
    one, other = train_with(
        run,
        [
            {"point": "step.loss", "kind": "nan", "rank": 1, "step": 3, **always},
            {"point": "step.backward", "kind": "nan", "rank": 0, "step": 5, "tensor": "experts", **always},
            {"point": "step.backward", "kind": "nan", "rank": 1, "step": 7, "tensor": "experts", **always},
            {"point": "step.loss", "kind": "scale", "rank": 0, "step": 13, "factor": 1000, **always},
        ],
    )
    assert one == other
    assert one["code"] == 0
    assert [step for step, *_ in one["seen"]] == list(range(1, STEPS + 1))
    assert {step: action for step, action, _ in one["seen"] if action != "update"} == dict.fromkeys(
        (3, 5, 7, 13), "skip"
    )
    assert all(unchanged == (action == "skip") for _, action, unchanged in one["seen"])

    findings = found(run)
    assert {step: detail["suspects"] for step, detail in findings.items()} == {
        step: [] for step in (3, 5, 7, 13)
    }
    assert "loss is nan" in findings[3]["found"]
    assert "gradient norm is nan" in findings[5]["found"]
    assert "first came from the gradient of" in findings[5]["found"]
    assert "experts" in findings[5]["found"]
    assert "deviations above the usual" in findings[13]["found"]
    steps = records(run, "step")
    assert [step["skipped"] for step in steps] == [s in (3, 5, 7, 13) for s in range(1, STEPS + 1)]
    assert steps[-1]["skipped_steps"] == 4
    record = json.loads(Path(findings[5]["record"]).read_text())
    assert record["computed_again"]["verdict"] == "same"
    assert [sum(piece["length"] for piece in sequence) <= 64 for sequence in record["sequences"]] == [
        True
    ] * 4

    again = guarded_run(tmp_path, "again", nonfinite=OnNonFinite.skip, spike=OnSpike.skip)
    Path(again.dir).mkdir()
    (Path(again.dir) / LEFT_OUT).write_bytes((Path(run.dir) / LEFT_OUT).read_bytes())
    train_with(again, [])
    known = {step: loss for step, loss in losses(run).items() if step not in (3, 5, 7, 13)}
    assert {step: loss for step, loss in losses(again).items() if step in known} == known


def test_a_batch_that_only_the_hardware_spoils_ends_the_run_and_is_trained_by_the_next(
    tmp_path: Path,
) -> None:
    golden = guarded_run(tmp_path, "golden")
    train_with(golden, [])
    guards = {"nonfinite": OnNonFinite.skip, "spike": OnSpike.rollback}
    run = guarded_run(tmp_path, every_steps=3, **guards)
    for step, fault in (
        (4, {"point": "step.loss", "kind": "nan", "rank": 1, "occurrence": 2}),
        (11, {"point": "step.loss", "kind": "scale", "rank": 1, "factor": 1000}),
    ):
        one, other = train_with(run, [{**fault, "step": step}])
        assert one == other
        assert one["code"] == 16
        assert one["seen"][-1] == (step, "stop", True)
        assert "suspect the hardware: rank 1 is suspected" in one["message"]
        assert not (Path(run.dir) / LEFT_OUT).exists()
    assert [each["code"] for each in train_with(run, [])] == [0, 0]
    assert losses(run) == losses(golden)
    assert records(run, "step")[-1]["skipped_steps"] == 0


@pytest.mark.parametrize(
    ("fault", "guards", "code", "words"),
    [
        ({"times": 0}, {}, 17, "computed again it came out the same"),
        ({}, {}, 16, "suspect the hardware: rank 1 is suspected"),
        (
            {"step": None, "times": 0, "occurrence": 5},
            {"nonfinite": OnNonFinite.skip, "max_skipped_in_a_row": 1, "rerun": False},
            1,
            "guards.max_skipped_in_a_row = 1 steps were skipped before it",
        ),
    ],
    ids=["data", "hardware", "limit"],
)
def test_run_ends_with_the_code_that_says_why(
    tmp_path: Path, fault: dict[str, Any], guards: dict[str, Any], code: int, words: str
) -> None:
    run = guarded_run(tmp_path, **guards)
    one, other = train_with(run, [{"point": "step.loss", "kind": "nan", "rank": 1, "step": 2, **fault}])
    assert one == other
    assert one["code"] == code
    assert words in one["message"]
    assert "guards/step_0000000" in one["message"]
    assert one["seen"][-1][1:] == ("stop", True)
    assert len(records(run, "step")) == len(one["seen"]) - 1


def spike_in_step(step: int) -> dict[str, Any]:
    return {"point": "step.loss", "kind": "scale", "rank": 1, "step": step, "factor": 1000, "times": 0}


@pytest.mark.parametrize("killed", [False, True], ids=["in one go", "killed as it goes back"])
def test_run_goes_back_and_leaves_out_what_led_to_a_spike(tmp_path: Path, killed: bool) -> None:
    golden = guarded_run(tmp_path, "golden")
    Path(golden.dir).mkdir()
    (Path(golden.dir) / LEFT_OUT).write_text('[{"first": 8, "last": 11, "why": "rollback"}]')
    train_with(golden, [])
    # The checkpoint after step 10 has trained steps 8 to 10: only that after step 5 is from before them.
    run = guarded_run(tmp_path, every_steps=5, spike=OnSpike.rollback, rollback_steps=4)
    before = list(range(1, 12))
    if killed:
        with pytest.raises(RanksFailed):
            train_with(run, [spike_in_step(11), {"point": "setup.built", "kind": "kill", "step": 11}])
        before = []
    one, other = train_with(run, [] if killed else [spike_in_step(11)])
    assert one == other
    assert one["code"] == 0
    assert [step for step, *_ in one["seen"]] == [*before, *range(6, STEPS + 1)]
    assert json.loads((Path(run.dir) / LEFT_OUT).read_text()) == json.loads(
        (Path(golden.dir) / LEFT_OUT).read_text()
    )
    assert losses(run) == losses(golden)
    (aside,) = Path(run.dir).glob("checkpoints/step_00000010.passed-*")
    assert read_train_state(aside)["step"] == 10


def test_a_step_that_is_only_warned_of_needs_no_record(tmp_path: Path) -> None:
    run = guarded_run(tmp_path, spike=OnSpike.warn)
    Path(run.dir).mkdir()
    (Path(run.dir) / "guards").write_text("a file where the records' folder should be")
    one, other = train_with(run, [spike_in_step(11)])
    assert one == other
    assert one["code"] == 0
    assert found(run)[11]["action"] == "warn"
    run = guarded_run(tmp_path, "skips", spike=OnSpike.skip)
    Path(run.dir).mkdir()
    (Path(run.dir) / "guards").write_text("a file where the records' folder should be")
    with pytest.raises(RanksFailed, match="guards: File exists"):
        train_with(run, [spike_in_step(11)])


def test_run_whose_checkpoints_are_all_from_within_what_a_spike_leaves_out_stops(tmp_path: Path) -> None:
    run = guarded_run(tmp_path, every_steps=10, spike=OnSpike.rollback, rollback_steps=4)
    one, other = train_with(run, [spike_in_step(11)])
    assert one == other
    assert one["code"] == 17
    assert "none of its checkpoints is from before step 8" in one["message"]
    assert "guards.rollback_steps = 4" in one["message"]
    assert not (Path(run.dir) / LEFT_OUT).exists()

    (Path(run.dir) / LEFT_OUT).write_text('[{"first": 8, "last": 11, "why": "rollback"}]')
    with pytest.raises(RanksFailed, match="step_00000010 has trained steps that the run leaves out"):
        train_with(run, [])


def test_step_that_repeats_differently_is_caught_by_computing_it_twice(tmp_path: Path) -> None:
    run = guarded_run(tmp_path, replay_every_steps=3)
    flip = {"point": "step.backward", "kind": "flip", "rank": 1, "tensor": "layers.0", "bit": 20}
    one, other = train_with(run, [{**flip, "step": 2}, {**flip, "step": 6}])
    assert one == other
    assert one["code"] == 16
    assert "suspect the hardware: rank 1 is suspected" in one["message"]
    assert [step for step, *_ in one["seen"]] == [1, 2, 3, 4, 5, 6]
    quiet, plain = guarded_run(tmp_path, "quiet", replay_every_steps=3), guarded_run(tmp_path, "plain")
    for each in (quiet, plain):
        each.curriculum.stages["short"].tokens = 4 * 256
        train_with(each, [])
    assert losses(quiet) == losses(plain)
    assert found(quiet) == {}


def test_hardware_that_fails_in_a_spike_ends_the_run_that_would_only_warn(tmp_path: Path) -> None:
    grows = {"point": "step.backward", "kind": "scale", "factor": 1e6, "rank": 1, "tensor": "embedding"}
    run = guarded_run(tmp_path, replay_every_steps=3)
    one, other = train_with(run, [{**grows, "step": 12}])
    assert one == other
    assert one["code"] == 16
    assert one["seen"][-1] == (12, "stop", True)
    assert "gradient norm is" in one["message"]
    assert "suspect the hardware: rank 1 is suspected" in one["message"]
    finding = found(run)[12]
    assert (finding["action"], finding["suspects"]) == ("stop", [1])
    assert json.loads(Path(finding["record"]).read_text())["kind"] == "spike"

    alike = guarded_run(tmp_path, "alike", replay_every_steps=3)
    one, other = train_with(alike, [{**grows, "step": 12, "times": 0}])
    assert one == other
    assert one["code"] == 0
    assert found(alike)[12]["action"] == "warn"
    assert [action for *_, action, _ in one["seen"]] == ["update"] * STEPS
