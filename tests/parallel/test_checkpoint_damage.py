"""Every kind of damage to every file of a real checkpoint: none is loaded, and the older one is used."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from k3train.checkpoint.folder import LATEST, newest_good, step_name
from k3train.checkpoint.load import load_checkpoint
from k3train.checkpoint.manifest import MANIFEST, CheckpointError, read_manifest
from k3train.checkpoint.save import Save, save_checkpoint
from k3train.config.schema import Parallel, Precision
from tests.damage import DAMAGE, OTHER
from tests.parallel.toy import build_toy, train_toy
from tests.ranks import run_ranks


def save_two(rank: int, folder: Path) -> None:
    chunks, optimizer, groups = build_toy(2, Parallel(tp=2), Precision.bf16)
    for step in (OTHER, 2):
        train_toy(chunks, optimizer, groups, steps=1, start=step)
        save_checkpoint(
            Save(
                directory=folder,
                chunks=chunks,
                optimizer=optimizer,
                train_state={"step": step},
                groups=groups,
                keep=2,
            )
        )


def restore(path: Path, saved: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    elif os.path.lexists(path):
        path.unlink()
    shutil.copyfile(saved, path)


def load_each(rank: int, folder: Path, whole: Path) -> Any:
    """(file, damage) -> what loading by name says, which checkpoint is chosen."""
    chunks, optimizer, groups = build_toy(1, Parallel(), Precision.bf16)
    damaged = folder / step_name(2)
    seen = {}
    for name in [*read_manifest(damaged).files, MANIFEST]:
        path = damaged / name
        for kind, damage in DAMAGE.items():
            damage(path)
            plain = path.is_file() and not path.is_symlink()
            if not plain or path.read_bytes() != (whole / name).read_bytes():
                try:
                    load_checkpoint(damaged, chunks=chunks, optimizer=optimizer, groups=groups)
                    message = "loaded"
                except CheckpointError as error:
                    message = str(error)
                seen[name, kind] = (message, str(newest_good(folder)))
            restore(path, whole / name)
    load_checkpoint(damaged, chunks=chunks, optimizer=optimizer, groups=groups)
    return seen


def test_no_damaged_file_is_loaded_silently(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_ranks(2, save_two, folder)
    whole = tmp_path / "whole"
    shutil.copytree(folder / step_name(2), whole)
    (seen,) = run_ranks(1, load_each, folder, whole)
    files = {name for name, _ in seen}
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata", "metadata.json", "train_state.json"} < files
    assert {"rng_00000.json", "rng_00001.json", MANIFEST} < files
    assert len(seen) >= 8 * len(files)
    assert {key: told for key, told in seen.items() if key[0] not in told[0]} == {}
    assert {chosen for _, chosen in seen.values()} == {str(folder / step_name(OTHER))}


def test_the_pointer_may_say_anything(tmp_path: Path) -> None:
    run_ranks(2, save_two, tmp_path)
    for kind, damage in DAMAGE.items():
        shutil.copyfile(tmp_path / step_name(2) / MANIFEST, tmp_path / LATEST)
        if kind != "from another checkpoint":
            damage(tmp_path / LATEST)
        assert newest_good(tmp_path) == tmp_path / step_name(2)
        restore(tmp_path / LATEST, tmp_path / step_name(2) / MANIFEST)
