"""Warnings of a longer context that gets worse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from k3train.monitor.ahead import AheadWatch
from k3train.monitor.metrics_file import METRICS, MetricsFile
from k3train.monitor.record import EvalRecord

AT_256 = EvalRecord(
    step=10,
    tokens=100,
    stage="short",
    heldout="books",
    context_tokens=256,
    loss=3.0,
    predicted_tokens=9,
    seconds=1.0,
)


def test_only_a_longer_context_with_a_higher_loss_is_warned_of() -> None:
    watch = AheadWatch()
    assert watch.worse(AT_256, 128) is None, "nothing to compare with"
    assert watch.worse(replace(AT_256, step=20, loss=3.0), 128) is None, "no change"
    assert watch.worse(replace(AT_256, step=25, heldout="code", loss=9.0), 128) is None, "another set"
    assert watch.worse(replace(AT_256, step=30, loss=3.25), 128) == {
        "heldout": "books",
        "context_tokens": 256,
        "loss": 3.25,
        "loss_before": 3.0,
        "step_before": 20,
    }
    assert watch.worse(replace(AT_256, step=40, loss=3.2), 128) is None, "better than at the last evaluation"
    assert watch.worse(replace(AT_256, step=50, loss=4.0), 256) is None, "the stage's own context"


def test_what_an_earlier_start_measured_counts_up_to_where_the_run_stands(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / METRICS)
    for step, loss in ((10, 3.0), (20, 2.5), (30, 2.0)):
        file.write(replace(AT_256, step=step, loss=loss))
    file.close()
    watch = AheadWatch()
    watch.read(tmp_path / METRICS, 20)
    worse = watch.worse(replace(AT_256, step=30, loss=2.6), 128)
    assert worse is not None
    assert (worse["step_before"], worse["loss_before"]) == (20, 2.5)
