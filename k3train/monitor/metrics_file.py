"""metrics.jsonl: every record of every attempt of a run, one JSON object a line."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from k3train.config.json_file import parse_json
from k3train.monitor.record import Record, StepRecord, to_json

METRICS = "metrics.jsonl"

logger = logging.getLogger(__name__)


class MetricsFile:
    """Appends records. Only one process writes it.

    Each opening is a new attempt of the run: lines of steps that are trained again stay, and the higher
    attempt tells which came later.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.attempt = 1 + max((each["attempt"] for each in read_records(path)), default=0)
        self._file = path.open("a", encoding="utf-8")
        if _ends_mid_line(path):
            self._file.write("\n")

    def write(self, record: Record) -> None:
        """Append one record and hand it to the operating system."""
        line = json.dumps(_encode(to_json(record, self.attempt)), allow_nan=False)
        with self._naming_the_file():
            self._file.write(line + "\n")
            self._file.flush()

    def close(self) -> None:
        """Make all lines durable."""
        with self._naming_the_file():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    @contextlib.contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._file.name) from error


def read_records(
    path: Path, needed: Mapping[str, Mapping[str, type]] = MappingProxyType({})
) -> Iterator[dict[str, Any]]:
    """Every record in the order of writing, as JSON data; nothing when the file does not exist.

    A line that a kill cut short is passed over with a warning, and so is a record without a field that
    ``needed`` has for its kind, or with one of another type.
    """
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                record = _decode(parse_json(text))
                ours = isinstance(record, dict) and _has(record, {"kind": str, "attempt": int})
                ours = ours and _has(record, needed.get(record["kind"], {}))
            except ValueError:
                ours = False
            if not ours:
                logger.warning("%s: line %d is incomplete and is passed over", path, number)
                continue
            yield record


def _has(record: dict[str, Any], fields: Mapping[str, type]) -> bool:
    return all(type(record.get(name)) is kind for name, kind in fields.items())


def read_steps(path: Path) -> list[StepRecord]:
    """One record per step, in order of steps: that of the latest attempt that trained the step."""
    latest: dict[int, tuple[int, dict[str, Any]]] = {}
    for record in read_records(path):
        if record.pop("kind") != StepRecord.kind:
            continue
        attempt = record.pop("attempt")
        if attempt >= latest.get(record["step"], (0, {}))[0]:
            latest[record["step"]] = (attempt, record)
    return [StepRecord(**latest[step][1]) for step in sorted(latest)]


def _ends_mid_line(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _encode(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become strings."""
    if isinstance(value, dict):
        return {key: _encode(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return f"float:{value}"
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _decode(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_decode(each) for each in value]
    if isinstance(value, str) and value in ("float:nan", "float:inf", "float:-inf"):
        return float(value.removeprefix("float:"))
    return value
