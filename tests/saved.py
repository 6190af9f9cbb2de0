"""A checkpoint as far as its manifest and its train state tell, without a tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from k3train.checkpoint.folder import step_name
from k3train.checkpoint.manifest import Manifest, digest_file, write_manifest
from k3train.config.trained import CHECKPOINTS, TRAIN_STATE


def save_checkpoint(run_dir: Path, step: int, train: dict[str, Any] | None = None) -> Path:
    """Write a complete checkpoint of step ``step`` into a run's folder; ``train`` is what its run says."""
    path = run_dir / CHECKPOINTS / step_name(step)
    path.mkdir(parents=True)
    (path / TRAIN_STATE).write_text(json.dumps({"train": train or {}}))
    return seal(path, step)


def seal(path: Path, step: int) -> Path:
    """Write the manifest of a checkpoint's folder as its train state now is."""
    files = {TRAIN_STATE: digest_file(path / TRAIN_STATE)}
    write_manifest(path, Manifest(step=step, milestone=False, files=files))
    return path
