"""What happened to a run over its starts: its id, and one JSON line for each start and change of settings."""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from pathlib import Path
from typing import Any

from k3train.config.durable import append_line
from k3train.config.problems import BadInput

HISTORY = "history.jsonl"
RUN_ID = "run_id"


def record(run_dir: Path, event: str, **detail: Any) -> None:
    """Append one durable line of JSON data to the run's history. One process at a time. Raises OSError."""
    run_dir.mkdir(parents=True, exist_ok=True)
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    line = json.dumps({"time": when, "event": event, **detail})
    append_line(run_dir / HISTORY, line)


def run_id(run_dir: Path) -> str:
    """The run's id: made at its first start and the same after every requeue, on every machine.

    Raises BadInput when the file holds something else.
    """
    path = run_dir / RUN_ID
    if not path.exists():
        run_dir.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{RUN_ID}.{uuid.uuid4().hex}")
        partial.write_text(f"{uuid.uuid4().hex[:12]}\n", encoding="utf-8")
        try:
            os.link(partial, path)  # whoever is first names the run
        except FileExistsError:
            pass
        finally:
            partial.unlink()
    found = path.read_text(encoding="utf-8", errors="replace").strip()
    if not re.fullmatch(r"[\w-]{1,64}", found, re.ASCII):
        raise BadInput(f"{path} holds no run's id, which is one word: restore it, or remove it")
    return found
