"""Reading a run's history."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from k3train.config.history import HISTORY


def read_history(run_dir: Path) -> list[dict[str, Any]]:
    """The run's history, oldest first."""
    path = run_dir / HISTORY
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
