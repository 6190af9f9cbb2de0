"""What a checkpoint tells of its run, read as data; no tensor is touched."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from k3train.config.build import Builder
from k3train.config.json_file import parse_json
from k3train.config.schema import Run

CHECKPOINTS = "checkpoints"
"""Folder of a run with its checkpoints."""

CHECKPOINT_NAME = re.compile(r"step_(\d{8,})")
"""Name of a complete checkpoint."""

MANIFEST = "MANIFEST.json"
"""File of a checkpoint that lists the others."""

TRAIN_STATE = "train_state.json"
"""File of a checkpoint with what is not a tensor: settings, position, layout, optimizer steps, versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """How far a run has come; by default nothing is trained."""

    steps: int = 0
    """Of the newest complete checkpoint."""
    tokens: int | None = None
    """What that has trained; None where it does not say."""
    corpora: Mapping[str, str] = field(default_factory=dict[str, str])
    """Hash of the text of each source that its stage drew from; empty where it does not say."""
    checkpoint: Path | None = None
    """The newest complete checkpoint whose settings can be read."""
    settings: Run | None = None
    """What that was trained with."""


def settings_of(checkpoint: Path) -> Run | None:
    """The settings that ``checkpoint`` was trained with, or None where this k3train cannot read them."""
    record = train_record(checkpoint)
    if "settings" not in record:
        return None
    builder = Builder()
    run = builder.build(record["settings"])
    return None if builder.problems else run


def train_record(checkpoint: Path) -> dict[str, Any]:
    """What a run has written of itself into ``checkpoint``; nothing where that cannot be read."""
    record: object = _read(checkpoint / TRAIN_STATE).get("train")
    return cast("dict[str, Any]", record) if isinstance(record, dict) else {}


def _read(path: Path) -> dict[str, Any]:
    try:
        content: object = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", content) if isinstance(content, dict) else {}
