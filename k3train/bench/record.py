"""The file of one run of the benchmark: what it holds, and how it is read back. No torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from k3train.config.problems import BadInput

FORMAT = "k3train bench 1"
MEASURED, ABSENT, NONE, FAILED, LATE = "measured", "not installed", "has none", "failed", "no time"
STATUS = (MEASURED, ABSENT, NONE, FAILED, LATE)


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
        beside = path.with_name(path.name + ".part")
        beside.parent.mkdir(parents=True, exist_ok=True)
        rows = [{k: v for k, v in asdict(row).items() if v not in (None, "")} for row in self.rows]
        body = {"format": FORMAT, "made": self.made, "ceilings": self.ceilings, "rows": rows}
        if self.audit is not None:
            body["audit"] = self.audit
        beside.write_text(json.dumps(body, indent=1) + "\n")
        beside.replace(path)


def read_record(path: Path) -> Record:
    """What ``Record.write`` wrote. Raises BadInput when the file is something else."""
    try:
        body = json.loads(path.read_text())
    except (ValueError, UnicodeDecodeError):
        raise BadInput(f"{path} is no JSON; give a file that k3train bench --out has written") from None
    except IsADirectoryError:
        raise BadInput(f"{path} is a folder; give a file that k3train bench --out has written") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise BadInput(f"{path} was not written by k3train bench: its format is not {FORMAT!r}")
    known = {each.name for each in fields(Row)}
    try:
        rows = [Row(**{name: value for name, value in row.items() if name in known}) for row in body["rows"]]
        return Record(made=body["made"], ceilings=body["ceilings"], rows=rows, audit=body.get("audit"))
    except (KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path} is damaged: {error}") from None
