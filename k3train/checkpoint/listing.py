"""Which checkpoints lie in a run's folder, found out without torch and without reading a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from k3train.checkpoint.manifest import CheckpointError, Manifest, check_sizes, read_manifest
from k3train.config.problems import BadInput
from k3train.config.trained import CHECKPOINT_NAME, CHECKPOINTS, Trained, settings_of, train_record


def committed(directory: Path) -> list[tuple[int, Path]]:
    """(step, folder) of everything named like a checkpoint, newest first, good or not.

    Raises CheckpointError when the folder is there and cannot be read: a run never starts anew by accident.
    """
    found = [(m, path) for path in entries(directory) if (m := CHECKPOINT_NAME.fullmatch(path.name))]
    return sorted(((int(m[1]), path) for m, path in found), reverse=True)


def entries(directory: Path) -> list[Path]:
    """Everything that lies in a folder, which need not be there. Raises what ``committed`` does."""
    try:
        return sorted(directory.iterdir())
    except FileNotFoundError as error:
        if directory.is_symlink():
            raise CheckpointError(f"{directory} is a link that leads nowhere: repair or remove it") from error
        return []
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error.strerror}") from error


def complete(directory: Path) -> Iterator[tuple[int, Path, Manifest]]:
    """(step, folder, manifest) of the checkpoints whose manifest is intact and whose files are there with
    their sizes, newest first. Digests are compared when one is loaded. Raises what ``committed`` does."""
    for step, path in committed(directory):
        if not isinstance(found := _look(path), CheckpointError):
            yield step, path, found


def last_trained(run_dir: Path) -> Trained:
    """What the newest complete checkpoints of the run in ``run_dir`` tell.

    One whose settings cannot be read, or that another version of k3train wrote, tells the rest only. Raises
    CheckpointError when the folder cannot be read, or holds checkpoints of which none is complete, as a start
    would; and BadInput when one is named for another step than it holds.
    """
    newest: Trained | None = None
    for step, path, manifest in complete(run_dir / CHECKPOINTS):
        check_name(path, step, manifest.step)
        newest = newest or _position(step, train_record(path))
        if (settings := settings_of(path)) is not None:
            return replace(newest, checkpoint=path, settings=settings)
    if newest is not None:
        return newest
    if found := committed(run_dir / CHECKPOINTS):
        raise none_usable(run_dir / CHECKPOINTS, len(found), str(_look(found[0][1])))
    return Trained()


def check_name(checkpoint: Path, named: int, held: int) -> None:
    """Raise BadInput when a checkpoint that is named for step ``named`` holds step ``held``, another one."""
    if held != named:
        raise BadInput(
            f"{checkpoint} holds step {held}, not {named} as its name says: name it step_{held:08d} again, "
            "or move it out of the run's folder"
        )


def none_usable(directory: Path, count: int, newest: str) -> CheckpointError:
    """That a folder has ``count`` checkpoints and none can be used: why the newest cannot, and what to do."""
    return CheckpointError(
        f"{directory}: none of the {count} checkpoints can be used; the newest: {newest}. "
        "Restore one, or move the folder away to start again"
    )


def _look(path: Path) -> Manifest | CheckpointError:
    """The manifest of a complete checkpoint, or why it is none."""
    try:
        manifest = read_manifest(path)
        check_sizes(path, manifest)
    except CheckpointError as error:
        return error
    return manifest


def _position(step: int, record: dict[str, Any]) -> Trained:
    """What a checkpoint of ``step`` says of itself apart from its settings."""
    tokens, data = record.get("tokens"), record.get("data")
    corpora = data.get("corpora") if isinstance(data, dict) else None
    return Trained(
        steps=step,
        tokens=tokens if isinstance(tokens, int) else None,
        corpora=corpora if isinstance(corpora, dict) else {},
    )
