"""The file of one run of the benchmark: what it holds, and how it is read back. No torch."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from k3train.bench.items import OURS
from k3train.bench.output import unwritable
from k3train.config.json_file import read_json
from k3train.config.problems import BadInput

FORMAT = "k3train bench 1"
MEASURED, ABSENT, NONE, FAILED, LATE = "measured", "not installed", "has none", "failed", "no time"
EXPIRED = "did not end within"
"""How the reason begins of a process that was given too little time."""


@dataclass(kw_only=True, slots=True)
class Row:
    """One call of one contender at one shape, or why there is no number for it."""

    item: str
    shape: dict[str, int]
    by: str
    """k3train or a peer's name."""
    what: str
    """forward, forward + backward, or the name of a part."""
    status: str
    reason: str = ""
    """Why it is not measured, in one line."""
    ms: float | None = None
    """Median of single calls."""
    low: float | None = None
    """First quartile, ms."""
    high: float | None = None
    """Third quartile, ms."""
    repeats: int | None = None
    floor_ms: float | None = None
    ratio: float | None = None
    """ms over floor_ms."""
    tflop_s: float | None = None
    """Counted FLOPs over ms."""
    gb_s: float | None = None
    """Counted bytes over ms."""
    peak_gib: float | None = None
    """Most memory held during the calls, inputs included: of the device, on the CPU of the process."""
    dtype: str = ""
    routing: str = ""
    """natural (by a router's scores), forced, or empty where nothing is routed."""
    note: str = ""


@dataclass(kw_only=True, slots=True)
class Record:
    """Everything that one run of the benchmark found out."""

    made: dict[str, Any]
    """date, command, machine and versions."""
    ceilings: dict[str, float] = field(default_factory=dict)
    """copy_gb_s and matmul_tflop_s, measured in the same run."""
    rows: list[Row] = field(default_factory=list)
    audit: dict[str, Any] | None = None

    def write(self, path: Path) -> None:
        """As JSON, whole or not at all."""
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        rows = [{k: v for k, v in asdict(row).items() if v not in (None, "")} for row in self.rows]
        body = {"format": FORMAT, "made": self.made, "ceilings": self.ceilings, "rows": rows}
        if self.audit is not None:
            body["audit"] = self.audit
        try:
            beside.write_text(json.dumps(body, indent=1) + "\n")
            beside.replace(path)
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise unwritable(path, error) from None


def read_record(path: Path) -> Record:
    """What ``Record.write`` wrote. Raises BadInput when the file is something else."""
    fix = "give a file that k3train bench --out has written"
    try:
        body = read_json(path, BadInput, fix)
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist; {fix}") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise BadInput(f"{path} was not written by k3train bench: its format is not {FORMAT!r}")
    known = {each.name for each in fields(Row)}
    try:
        rows = [Row(**{name: value for name, value in row.items() if name in known}) for row in body["rows"]]
        return Record(made=body["made"], ceilings=body["ceilings"], rows=rows, audit=body.get("audit"))
    except (KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path} is damaged: {error}") from None


def own_trouble(record: Record) -> str:
    """Why the file has no time of k3train's own, and what to do; empty when it has one."""
    rows = [row for row in record.rows if row.by == OURS]
    if any(row.status == MEASURED for row in rows):
        return ""
    reasons = list(dict.fromkeys(row.reason for row in rows))
    fix = "try smaller sizes with --shape"
    if any(row.status == LATE for row in rows):
        fix = "give more seconds with --budget"
    elif all(row.reason.startswith(EXPIRED) for row in rows):
        fix = "give more with --item-seconds"
    return f"nothing of {OURS}'s own could be measured ({'; '.join(reasons[:3])}); {fix}"
