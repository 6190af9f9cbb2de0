"""The monitor of a rank: who writes, what a failing sink does, what a missing package says."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from k3train.config.problems import ConfigError
from k3train.config.schema import Run
from k3train.monitor.metrics_file import METRICS, MetricsFile, read_records, read_steps
from k3train.monitor.monitor import Monitor, open_monitor
from k3train.monitor.record import EventRecord, Record
from k3train.monitor.sinks import TensorBoard, scalars
from tests.unit.monitor.test_console import STEP


def test_one_rank_writes_file_and_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(dir=str(tmp_path / "run"))
    run.monitor.console_every_steps = 1
    for writes in (True, False):
        monitor = open_monitor(run, writes=writes)
        monitor.write(STEP)
        monitor.event("checkpoint", step=120, tokens=480_000, path="step_00000120")
        monitor.close()
    kinds = [each["kind"] for each in read_records(tmp_path / "run" / METRICS)]
    assert kinds == ["step", "event"]
    assert len(capsys.readouterr().out.splitlines()) == 2


class Broken:
    """A sink whose connection is gone."""

    def __init__(self) -> None:
        self.calls = 0

    def write(self, record: Record) -> None:
        self.calls += 1
        raise ConnectionError("gone")

    def close(self) -> None:
        raise ConnectionError("still gone")


def test_a_failing_sink_is_switched_off_and_the_rest_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Broken()
    monitor = Monitor(MetricsFile(tmp_path / METRICS), [broken])
    monitor.write(STEP)
    monitor.write(replace(STEP, step=121))
    monitor.close()
    assert broken.calls == 1
    assert [each.step for each in read_steps(tmp_path / METRICS)] == [120, 121]
    assert "Broken failed and is switched off: gone" in caplog.text


@pytest.mark.parametrize("extra", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_with_its_fix(tmp_path: Path, extra: str) -> None:
    if importlib.util.find_spec(extra):
        pytest.skip(f"{extra} is installed")
    run = Run(dir=str(tmp_path))
    setattr(run.monitor, extra, True)
    with pytest.raises(ConfigError, match=rf"monitor\.{extra} .*pip install 'k3train\[{extra}\]'"):
        open_monitor(run, writes=True)
    assert not (tmp_path / METRICS).exists()


def test_the_numbers_of_a_step_have_names() -> None:
    values = scalars(replace(STEP, memory_gib=None))
    assert values["train/loss"] == STEP.loss
    assert values["train/skipped"] == 0.0
    assert "train/memory_gib" not in values
    assert "train/stage" not in values
    assert scalars(EventRecord(step=1, tokens=1, event="stop")) == {}


def test_tensorboard_receives_steps(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for loss in (5.0, 4.0):  # the second attempt replays the step
        sink = TensorBoard(tmp_path)
        sink.write(replace(STEP, loss=loss))
        sink.write(EventRecord(step=121, tokens=0, event="stop"))
        sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(120, 4.0)]
