"""The one object that training writes its records to."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from k3train.config.schema import Run
from k3train.config.secrets import redact_data
from k3train.monitor.console import Console
from k3train.monitor.metrics_file import METRICS, MetricsFile
from k3train.monitor.record import EventRecord, Record
from k3train.monitor.sinks import Sink, TensorBoard, WeightsAndBiases

logger = logging.getLogger(__name__)


class Monitor:
    """Hands records to metrics.jsonl first, then to the other sinks.

    A sink other than metrics.jsonl that fails is closed with a warning; training goes on.
    """

    def __init__(self, metrics: MetricsFile | None, sinks: list[Sink]) -> None:
        self._metrics, self._sinks = metrics, sinks

    def write(self, record: Record) -> None:
        """Record something. On ranks that write nothing this does nothing."""
        if self._metrics:
            self._metrics.write(record)
        for sink in list(self._sinks):
            try:
                sink.write(record)
            except Exception as error:  # a lost connection must not end a run
                logger.warning("%s failed and is switched off: %s", type(sink).__name__, error)
                self._sinks.remove(sink)

    def event(self, event: str, *, step: int, tokens: int, **detail: Any) -> None:
        """Record an event with JSON details, secrets in them hidden."""
        self.write(EventRecord(event=event, step=step, tokens=tokens, detail=redact_data(detail)))

    def close(self) -> None:
        """Write what is buffered and close every sink."""
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:
                logger.warning("%s failed while closing: %s", type(sink).__name__, error)
        if self._metrics:
            self._metrics.close()


def open_monitor(run: Run, *, writes: bool) -> Monitor:
    """The monitor of one rank; exactly one rank ``writes``.

    Raises ConfigError when a sink that the run asks for is not installed.
    """
    if not writes:
        return Monitor(None, [])
    folder = Path(run.dir)
    sinks: list[Sink] = [Console(sys.stdout, run.monitor.console_every_steps)]
    if run.monitor.tensorboard:
        sinks.append(TensorBoard(folder))
    if run.monitor.wandb:
        sinks.append(WeightsAndBiases(folder, project=run.monitor.wandb_project, name=run.name))
    return Monitor(MetricsFile(folder / METRICS), sinks)
