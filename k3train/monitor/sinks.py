"""Where records go besides metrics.jsonl and the console."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from k3train.config.history import run_id
from k3train.config.problems import ConfigError, ConfigProblem
from k3train.monitor.record import BalanceRecord, EvalRecord, EventRecord, Record, StepRecord


class Sink(Protocol):
    """Takes records until it is closed."""

    def write(self, record: Record) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """TensorBoard event files in ``<run>/tensorboard``; a replayed step replaces what it showed before."""

    def __init__(self, run_dir: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard") from error
        self._folder = str(run_dir / "tensorboard")
        self._open = SummaryWriter
        self._writer: Any = None

    def write(self, record: Record) -> None:
        """Add every number of the record at its step."""
        if self._writer is None:
            self._writer = self._open(self._folder, purge_step=record.step)
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record.step)
        if isinstance(record, EventRecord):
            self._writer.add_text(f"event/{record.event}", str(record.detail), record.step)

    def close(self) -> None:
        """Write what is buffered."""
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """One Weights & Biases run for all attempts: under the run's own id."""

    def __init__(self, run_dir: Path, *, project: str, name: str) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise _missing("wandb") from error
        self._run = wandb.init(
            project=project,
            name=name,
            id=run_id(run_dir),
            resume="allow",
            dir=str(run_dir),
            # It would send what is printed, as it was before secrets were hidden in it.
            settings=wandb.Settings(console="off"),
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Record) -> None:
        """Log every number of the record. Its own step counter is not used: it cannot go back."""
        values = scalars(record)
        if values:
            self._run.log({**values, "step": record.step})

    def close(self) -> None:
        """Upload what is left."""
        self._run.finish()


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a record under slash-separated names; empty for an event."""
    match record:
        case StepRecord():
            values = {f"train/{key}": value for key, value in asdict(record).items() if key != "step"}
        case EvalRecord():
            values = {f"eval/{record.heldout}/{record.context_tokens}/loss": record.loss}
        case BalanceRecord():
            values = {
                f"balance/{name}/layer_{layer:03d}": value
                for name, column in record.values.items()
                for layer, value in zip(record.layers, column, strict=True)
            }
        case EventRecord():
            values = {}
    return {key: float(value) for key, value in values.items() if isinstance(value, int | float)}


def _missing(extra: str) -> ConfigError:
    return ConfigError(
        [
            ConfigProblem(
                f"monitor.{extra}",
                True,
                f"needs the package {extra}, which is not installed",
                f"pip install 'k3train[{extra}]', or set monitor.{extra}=false",
                f"monitor_{extra}",
            )
        ]
    )
