"""What lies trained in a run's folder, read from its checkpoints as data; no tensor is touched."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from k3train.config.build import Builder
from k3train.config.json_file import parse_json
from k3train.config.problems import BadInput
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
    """Of the newest checkpoint, good or not."""
    checkpoint: Path | None = None
    """The newest checkpoint whose settings can be read."""
    settings: Run | None = None
    """What that was trained with."""
    tokens: int | None = None
    """What that has trained; None where it does not say."""


def last_trained(run_dir: Path) -> Trained:
    """What the newest checkpoints of the run in ``run_dir`` tell.

    A checkpoint whose settings cannot be read, or that another version of k3train wrote, tells its step only.
    Raises OSError when there is a folder of checkpoints and it cannot be read, and BadInput when one is named
    for another step than it holds.
    """
    folder = run_dir / CHECKPOINTS
    entries = folder.iterdir() if os.path.lexists(folder) else ()
    found = [(int(m[1]), path) for path in entries if (m := CHECKPOINT_NAME.fullmatch(path.name))]
    for step, path in found:
        check_name(path, step, _held_step(path))
    steps = max((step for step, _ in found), default=0)
    for _, path in sorted(found, reverse=True):
        if (settings := settings_of(path)) is not None:
            tokens = _train_record(path).get("tokens")
            return Trained(
                steps=steps,
                checkpoint=path,
                settings=settings,
                tokens=tokens if isinstance(tokens, int) else None,
            )
    return Trained(steps=steps)


def settings_of(checkpoint: Path) -> Run | None:
    """The settings that ``checkpoint`` was trained with, or None where this k3train cannot read them."""
    record = _train_record(checkpoint)
    if "settings" not in record:
        return None
    builder = Builder()
    run = builder.build(record["settings"])
    return None if builder.problems else run


def check_name(checkpoint: Path, named: int, held: object) -> None:
    """Raise BadInput when a checkpoint that is named for step ``named`` holds step ``held``, another one."""
    if isinstance(held, int) and held != named:
        raise BadInput(
            f"{checkpoint} holds step {held}, not {named} as its name says: name it step_{held:08d} again, "
            "or move it out of the run's folder"
        )


def _held_step(checkpoint: Path) -> object:
    """The step that a checkpoint tells of itself; None where its files do not agree: one is damaged then."""
    manifest: object = _read(checkpoint / MANIFEST).get("step")
    return manifest if manifest == _train_record(checkpoint).get("step") else None


def _train_record(checkpoint: Path) -> dict[str, Any]:
    """What a run has written of itself into ``checkpoint``; nothing where that cannot be read."""
    record: object = _read(checkpoint / TRAIN_STATE).get("train")
    return cast("dict[str, Any]", record) if isinstance(record, dict) else {}


def _read(path: Path) -> dict[str, Any]:
    try:
        content: object = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", content) if isinstance(content, dict) else {}
