"""The summary of a run, from files as a run writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import summary
from rich.console import Console

from k3train.config.compose import compose, save_resolved
from k3train.config.schema import Run
from k3train.curriculum.stages import stage_table
from tests.saved import save_checkpoint


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return compose(["experiment=debug", f"dir={tmp_path / 'run'}"])


def write(run: Run, *records: dict[str, Any], tail: str = "") -> None:
    path = Path(run.dir) / "metrics.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail)


def evaluation(tokens: int, context: int, loss: float | str, attempt: int = 1) -> dict[str, Any]:
    return {
        "kind": "eval",
        "attempt": attempt,
        "step": tokens,
        "tokens": tokens,
        "stage": "any",
        "heldout": "heldout",
        "context_tokens": context,
        "loss": loss,
    }


def step(number: int, stage: str, seconds: float, attempt: int = 1) -> dict[str, Any]:
    return {"kind": "step", "attempt": attempt, "step": number, "stage": stage, "step_seconds": seconds}


def test_a_stage_starts_where_it_was_evaluated_one_ahead_and_ends_at_its_last_evaluation(run: Run) -> None:
    first, second, *_ = stage_table(run)
    short, long = first.stage.context_tokens, second.stage.context_tokens
    write(
        run,
        evaluation(0, short, 8.3),
        evaluation(first.end_tokens, short, 5.0),
        evaluation(first.end_tokens, long, 5.2),
        evaluation(second.end_tokens, long, 4.5),
        evaluation(second.end_tokens, short, 1.0),
    )
    one, two, three, _ = summary.summarise(run, summary.read(Path(run.dir) / "metrics.jsonl"))
    assert one.heldout == {"heldout": (8.3, 5.0)}
    assert two.heldout == {"heldout": (5.2, 4.5)}
    assert three.heldout == {"heldout": (None, None)}


def test_steps_trained_twice_count_once_as_trained_last_and_a_cut_line_is_passed_over(run: Run) -> None:
    first = stage_table(run)[0]
    write(
        run,
        step(1, first.name, 1.0),
        step(2, first.name, 100.0),
        step(2, first.name, 3.0, attempt=2),
        evaluation(first.end_tokens, first.stage.context_tokens, "float:nan"),
        evaluation(first.end_tokens, first.stage.context_tokens, 4.0, attempt=2),
        tail='{"kind": "step", "st',
    )
    one = summary.summarise(run, summary.read(Path(run.dir) / "metrics.jsonl"))[0]
    assert one.steps == 2
    assert one.tokens_per_second == 2 * first.stage.batch_tokens / 4.0
    assert one.heldout["heldout"] == (None, 4.0)


def test_records_that_are_not_whole_are_passed_over_with_their_line(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    plan = stage_table(run)[0]
    context = plan.stage.context_tokens
    whole = [step(1, plan.name, 2.0), evaluation(1, context, 8.25), evaluation(2, context, 8.0)]
    cut = [{key: each[key] for key in each if key != name} for each in whole for name in each]
    odd = [each | {name: value} for each in whole for name in each for value in (None, [1], {}, True)]
    write(run, *whole, *cut, *odd, {"kind": "event", "attempt": 1, "event": ["odd"], "step": {}})
    path = Path(run.dir) / "metrics.jsonl"
    one = summary.summarise(run, summary.read(path))[0]
    assert one.steps == 1
    assert one.tokens_per_second == plan.stage.batch_tokens / 2.0
    assert one.heldout["heldout"] == (8.25, 8.0)
    assert f"{path}: line 4 is incomplete and is passed over" in caplog.text


def test_the_state_comes_from_the_newest_complete_checkpoint(run: Run) -> None:
    folder = Path(run.dir) / "checkpoints"
    assert summary.state(run) == "new"
    (folder / "step_00000054.tmp-abc").mkdir(parents=True)
    assert summary.state(run) == "new"
    nine = save_checkpoint(Path(run.dir), 9)
    assert summary.state(run) == "interrupted"
    last = save_checkpoint(Path(run.dir), stage_table(run)[-1].end_step)
    assert summary.state(run) == "finished"
    assert summary.checkpoints(Path(run.dir)) == [nine, last]


def test_a_checkpoint_that_is_not_complete_is_neither_listed_nor_counted(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(run.dir)
    save_resolved(run, folder / "run.yaml")
    write(run, evaluation(0, 256, 8.25))
    stray = folder / "checkpoints" / f"step_{stage_table(run)[-1].end_step:08d}"
    stray.mkdir(parents=True)
    for words in ([str(folder)], [str(folder), "--state"]):
        assert summary.main(words) == 2
        assert f"none of the 1 checkpoints can be used; the newest: {stray}" in capsys.readouterr().err
    nine = save_checkpoint(folder, 9)
    assert summary.main([str(folder)]) == 0
    shown = capsys.readouterr().out.replace("\n", "")
    assert f"{run.name}: interrupted" in shown
    assert f"checkpoint  {nine}" in shown
    assert str(stray) not in shown


def test_the_table_names_every_stage_and_file(run: Run) -> None:
    plan = stage_table(run)[0]
    write(run, evaluation(0, plan.stage.context_tokens, 8.25), step(1, plan.name, 2.0))
    console = Console(width=100, record=True, force_terminal=False, quiet=False)
    with console.capture() as shown:
        summary.print_summary(run, console)
    text = shown.get()
    assert all(plan.name in text for plan in stage_table(run))
    assert f"1/{plan.steps}" in text
    assert f"{run.dir}/metrics.jsonl" in text


def test_the_run_s_own_settings_count_not_those_that_lead_to_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = compose(["curriculum=short", "name=first", f"dir={tmp_path / 'run'}"])
    save_resolved(run, tmp_path / "run" / "run.yaml")
    plans = stage_table(run)
    write(run, *(step(number + 1, plans[0].name, 1.0) for number in range(plans[0].steps)))
    save_checkpoint(tmp_path / "run", plans[-1].end_step)
    moved = tmp_path / "moved"
    (tmp_path / "run").rename(moved)
    for words in ([f"dir={moved}", "name=other"], [str(moved)]):
        assert summary.main(words) == 0
        shown = capsys.readouterr().out
        assert "first: finished" in shown
        assert f"{plans[0].steps}/{plans[0].steps}" in shown
        assert len(plans) < len(stage_table(compose([])))
        assert not any(plan.name in shown for plan in stage_table(compose([]))[len(plans) :])
        assert str(moved / "metrics.jsonl") in shown.replace("\n", "")
        assert summary.main([*words, "--state"]) == 0
        assert capsys.readouterr().out == f"finished {moved}\n"


def test_without_a_run_or_its_records_there_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    metrics = folder / "metrics.jsonl"

    def said(code: int) -> str:
        assert summary.main([str(folder)]) == code
        out, err = capsys.readouterr()
        assert out == ""
        return err

    assert said(2) == f"{folder} holds no run: {folder / 'run.yaml'} is not there; give the folder of a run\n"
    assert summary.main([str(folder), "--state"]) == 0
    assert capsys.readouterr().out == f"new {folder}\n"
    save_resolved(compose([]), folder / "run.yaml")
    assert f"{metrics} is not there: nothing has been trained" in said(2)
    for content in (b"", bytes(range(256)) * 8, b"5\n[]\n"):
        metrics.write_bytes(content)
        assert f"{metrics} holds no record: nothing has been trained, or the file is damaged" in said(2)
    metrics.unlink()
    metrics.mkdir()
    assert said(3) == f"{metrics}: Is a directory\n"
