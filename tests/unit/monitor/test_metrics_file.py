"""metrics.jsonl: attempts, torn lines, numbers JSON does not have."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from k3train.monitor.metrics_file import MetricsFile, read_records, read_steps
from k3train.monitor.record import EvalRecord, EventRecord, StepRecord
from tests.unit.monitor.test_console import STEP


def write_steps(path: Path, steps: range, loss: float) -> int:
    file = MetricsFile(path)
    for step in steps:
        file.write(replace(STEP, step=step, loss=loss))
    file.close()
    return file.attempt


def test_a_record_survives_the_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    write_steps(path, range(1, 2), 3.0)
    assert read_steps(path) == [replace(STEP, step=1, loss=3.0)]
    (text,) = path.read_text().splitlines()
    raw = json.loads(text)
    assert raw["kind"] == "step"
    assert raw["attempt"] == 1
    assert raw["tokens_per_second"] == STEP.tokens_per_second


def test_replayed_steps_come_from_the_latest_attempt(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert write_steps(path, range(1, 6), 1.0) == 1
    assert write_steps(path, range(4, 8), 2.0) == 2
    assert [(each.step, each.loss) for each in read_steps(path)] == [
        (1, 1.0),
        (2, 1.0),
        (3, 1.0),
        (4, 2.0),
        (5, 2.0),
        (6, 2.0),
        (7, 2.0),
    ]
    assert len(list(read_records(path))) == 9


def test_a_line_cut_by_a_kill_is_passed_over_and_never_joined(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 4), 1.0)
    path.write_bytes(path.read_bytes()[:-40])
    assert write_steps(path, range(3, 5), 2.0) == 2
    assert [(each.step, each.loss) for each in read_steps(path)] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]
    assert "line 3" in caplog.text


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_lacks_is_kept(tmp_path: Path, value: float) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 2), value)
    json.loads(path.read_text(), parse_constant=pytest.fail)
    assert read_steps(path)[0].loss == pytest.approx(value, nan_ok=True)


def test_every_line_is_on_disk_before_the_next_step(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(EventRecord(step=0, tokens=0, event="resume", detail={"from": "step_00000010"}))
    file.write(
        EvalRecord(
            step=1,
            tokens=10,
            stage="a",
            heldout="b",
            context_tokens=8,
            loss=1.5,
            predicted_tokens=7,
            seconds=0.1,
        )
    )
    kinds = [(each["kind"], each["attempt"]) for each in read_records(tmp_path / "metrics.jsonl")]
    assert kinds == [("event", 1), ("eval", 1)]


def test_a_line_that_is_nested_too_deeply_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 3), loss=1.0)
    with path.open("a") as file:
        file.write("[" * 200_000 + "\n")
    assert [record.step for record in read_steps(path)] == [1, 2]


def test_a_missing_file_has_no_records(tmp_path: Path) -> None:
    assert read_steps(tmp_path / "none.jsonl") == []


def test_binary_rubbish_does_not_stop_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 2), 1.0)
    rubbish = b'\xff\xfe{}\n[1]\n{"kind": "step"}\n{"kind": "step", "attempt": "x"}\n'
    path.write_bytes(rubbish + path.read_bytes())
    assert [each.step for each in read_steps(path)] == [1]
    assert isinstance(read_steps(path)[0], StepRecord)
