"""What lies trained in a run's folder, read from its checkpoints as data; no tensor is touched."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3train.config.build import Builder
from k3train.config.schema import Run

CHECKPOINTS = "checkpoints"
"""Folder of a run with its checkpoints."""

CHECKPOINT_NAME = re.compile(r"step_(\d{8,})")
"""Name of a complete checkpoint."""

TRAIN_STATE = "train_state.json"
"""File of a checkpoint with what is not a tensor: settings, position, layout, optimizer steps, versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """How far a run has come; by default nothing is trained."""

    steps: int = 0
    """Of the newest checkpoint, good or not."""
    checkpoint: Path | None = None
    """The newest checkpoint whose settings can be read."""
    settings: Run | None = None
    """What that was trained with."""


def last_trained(run_dir: Path) -> Trained:
    """What the newest checkpoints of the run in ``run_dir`` tell.

    A checkpoint whose settings cannot be read, or that another version of k3train wrote, tells its step only.
    Raises OSError when there is a folder of checkpoints and it cannot be read.
    """
    folder = run_dir / CHECKPOINTS
    entries = folder.iterdir() if os.path.lexists(folder) else ()
    found = [(int(m[1]), path) for path in entries if (m := CHECKPOINT_NAME.fullmatch(path.name))]
    steps = max((step for step, _ in found), default=0)
    for _, path in sorted(found, reverse=True):
        if (settings := settings_of(path)) is not None:
            return Trained(steps=steps, checkpoint=path, settings=settings)
    return Trained(steps=steps)


def settings_of(checkpoint: Path) -> Run | None:
    """The settings that ``checkpoint`` was trained with, or None where this k3train cannot read them."""
    try:
        record: Any = json.loads((checkpoint / TRAIN_STATE).read_bytes())
        settings: object = record["train"]["settings"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    builder = Builder()
    run = builder.build(settings)
    return None if builder.problems else run
