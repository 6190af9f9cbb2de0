"""What happened to a run over its starts: its id, and one JSON line for each start and change of settings."""

from __future__ import annotations

import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

HISTORY = "history.jsonl"
RUN_ID = "run_id"


def record(run_dir: Path, event: str, **detail: Any) -> None:
    """Append one durable line of JSON data to the run's history. One process at a time."""
    run_dir.mkdir(parents=True, exist_ok=True)
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    line = json.dumps({"time": when, "event": event, **detail})
    with (run_dir / HISTORY).open("a", encoding="utf-8") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_history(run_dir: Path) -> list[dict[str, Any]]:
    """The run's history, oldest first; a line that a kill cut short is left out."""
    entries: list[dict[str, Any]] = []
    path = run_dir / HISTORY
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            entries.append(json.loads(line))
        except ValueError:
            continue
    return entries


def run_id(run_dir: Path) -> str:
    """The run's id: made at its first start and the same after every requeue, on every machine."""
    path = run_dir / RUN_ID
    try:
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        run_dir.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{RUN_ID}.{uuid.uuid4().hex}")
        partial.write_text(f"{uuid.uuid4().hex[:12]}\n", encoding="utf-8")
        try:
            os.link(partial, path)  # whoever is first names the run
        except FileExistsError:
            pass
        finally:
            partial.unlink()
        return path.read_text(encoding="utf-8").strip()
