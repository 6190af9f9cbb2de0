"""Doing something to a run at the right moment, while it runs."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from k3train.config.schema import Run
from k3train.monitor.metrics_file import METRICS, read_records
from k3train.train.claim import STOP_FILE


@contextlib.contextmanager
def meanwhile(work: Callable[[], Any]) -> Iterator[None]:
    """Do one thing in a thread while the block runs."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield
    thread.join(10)


def touch_after_steps(run: Run, steps: int) -> None:
    """Make the stop file when this start has trained so many steps."""
    file = Path(run.dir) / METRICS
    before = _count_steps(file)
    wait_for(lambda: _count_steps(file) >= before + steps)
    (Path(run.dir) / STOP_FILE).touch()


def _count_steps(file: Path) -> int:
    return sum(record["kind"] == "step" for record in read_records(file))


def pid_of_fault(run: Run, step: int) -> int:
    """Process in which a fault of this step happened, once it has."""
    log = Path(run.dir) / "faults.jsonl"

    def happened() -> list[int]:
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        return [record["pid"] for record in records if record["step"] == step]

    wait_for(lambda: bool(happened()))
    return happened()[0]


def wait_for(true: Callable[[], bool]) -> None:
    """Wait until it is true, at most five minutes."""
    until = time.monotonic() + 300
    while not true() and time.monotonic() < until:
        time.sleep(0.02)
