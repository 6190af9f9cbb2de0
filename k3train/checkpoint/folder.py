"""The folder that holds a run's checkpoints: names, the newest good one, what is kept."""

from __future__ import annotations

import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from k3train.checkpoint.agree import every_rank, on_first_rank, rank, world
from k3train.checkpoint.listing import check_name, committed, complete, entries, none_usable
from k3train.checkpoint.manifest import (
    MANIFEST,
    PART,
    CheckpointError,
    CheckpointFault,
    check_files,
    read_manifest,
)
from k3train.checkpoint.trust import check_trusted
from k3train.faults import point

LATEST = "LATEST"
"""File with the name of the newest checkpoint: a hint for people and scripts, never trusted by k3train."""

type Unfit = Callable[[int, Path], str | None]
"""Why a checkpoint, given its step and folder, is not to be used for all that its bytes say; None when it
is. Asked on rank 0."""

_REPLACED = re.compile(r"(step_\d{8,})\.replaced-[0-9a-f]+")
_PASSED = re.compile(r"step_(\d{8,})\.passed-[0-9a-f]+")
_TEMPORARY = re.compile(r"step_\d{8,}\.(tmp|pruned)-[0-9a-f]+")

logger = logging.getLogger(__name__)


def step_name(step: int) -> str:
    """Folder name of the checkpoint after ``step`` steps."""
    return f"step_{step:08d}"


def scratch_name(step: int, kind: str) -> str:
    """A name no other save uses: ``tmp`` while writing, ``replaced`` and ``pruned`` while going away,
    ``passed`` of one that the run does not go on from."""
    return f"{step_name(step)}.{kind}-{uuid.uuid4().hex}"


def newest_good(directory: Path, unfit: Unfit | None = None) -> Path | None:
    """The newest checkpoint whose every byte is verified, or None when the folder holds none at all.

    One that is damaged, or that ``unfit`` says something about, is passed over with a warning that says why.
    Raises CheckpointError when there are checkpoints and none can be used: a run never restarts from nothing
    by accident; when a whole one is named for another step than it holds; and when somebody else could have
    changed the one that is next. Ranks share the reading; every rank of the world must call this.
    """
    candidates = on_first_rank(lambda: committed(directory))
    reasons = []
    for step, path in candidates:
        reason = _why_not(step, path, unfit)
        if reason is None:
            on_first_rank(lambda step=step, path=path: check_name(path, step, read_manifest(path).step))
            return path
        reasons.append(reason)
        if rank() == 0:
            logger.warning("checkpoint %s is passed over: %s", path.name, reason)
    if reasons:
        raise none_usable(directory, len(reasons), reasons[0])
    return None


def _why_not(step: int, path: Path, unfit: Unfit | None) -> str | None:
    on_first_rank(lambda: _check_trusted_if_complete(path))
    if unfit is not None and (reason := on_first_rank(lambda: unfit(step, path))):
        return reason
    try:
        _verify_content(path)
    except CheckpointFault:  # it says nothing of the checkpoint
        raise
    except CheckpointError as error:
        return str(error)
    return None


def verify(path: Path) -> None:
    """Read every file of a checkpoint and raise CheckpointError for the first that is not as it was written.

    Also raises it when somebody else could have changed them. Each rank reads its share of the files; every
    rank of the world must call this.
    """
    on_first_rank(lambda: check_trusted(path))
    _verify_content(path)


def _check_trusted_if_complete(path: Path) -> None:
    """Of a folder without a manifest nothing would be read."""
    if os.path.lexists(path / MANIFEST):
        check_trusted(path)


def _verify_content(path: Path) -> None:
    def check_my_share() -> None:
        manifest = read_manifest(path)
        point("ckpt.verify")
        check_files(path, manifest, sorted(manifest.files)[rank() :: world()])

    every_rank(check_my_share)


def clear_leftovers(directory: Path) -> None:
    """Remove what interrupted saves and prunes left behind. Only one rank, of the only job on this folder.

    A checkpoint that was set aside for a newer one of the same step comes back when that never arrived.
    """
    for path in entries(directory):
        replaced = _REPLACED.fullmatch(path.name)
        try:
            if replaced and not (directory / replaced[1]).exists():
                path.rename(directory / replaced[1])
            elif replaced or _TEMPORARY.fullmatch(path.name):
                logger.warning("removing %s, left by an interrupted save", path.name)
                if path.is_symlink():
                    path.unlink()
                else:
                    shutil.rmtree(path)
            elif path.name == f"{LATEST}{PART}":
                path.unlink()
        except OSError as error:
            logger.warning("%s, left by an interrupted save, stays: %s", path, error.strerror)


def set_aside(directory: Path, unfit: Unfit, *, after: int) -> None:
    """Give the checkpoints of steps after ``after`` that are ``unfit`` another name. Only one rank.

    A run that has gone back to ``after`` makes others of these steps, and must not take the old ones for its
    newest. They stay on the disk until ``prune`` finds them older than all that it keeps. One that could only
    not be read keeps its name: it may be well at the next start.
    """
    for step, path in committed(directory):
        if step > after and unfit(step, path):
            aside = directory / scratch_name(step, "passed")
            logger.warning("checkpoint %s, which is passed over, is now %s", path.name, aside.name)
            path.rename(aside)


def prune(directory: Path, *, keep: int, reach: int = 0, written: int | None = None) -> list[str]:
    """Delete old checkpoints and return the names of their folders. Only one rank.

    The newest ``keep`` (never fewer than 2) complete ones stay, the milestones, and the newest one that is
    ``reach`` steps older than ``written``, the step that was just saved (None: the newest of all). Those
    after ``written``, which the run could not go on from, neither count nor go. One that is damaged or was
    set aside goes once it is older than the ``keep`` newest.
    """
    manifests = {step: manifest for step, _, manifest in complete(directory)}
    written = max(manifests, default=0) if written is None else written
    steps = sorted((step for step in manifests if step <= written), reverse=True)
    newest = steps[: max(2, keep)]
    if len(newest) < max(2, keep):
        return []
    stay = {step for step, manifest in manifests.items() if manifest.milestone}
    stay.update([step for step in steps if step <= written - reach][:1])
    going = [(step, path) for step, path in committed(directory) if step not in stay]
    going += [(int(m[1]), path) for path in entries(directory) if (m := _PASSED.fullmatch(path.name))]
    deleted = []
    for step, path in going:
        if step < newest[-1]:
            # Renamed first: half a checkpoint must not bear a checkpoint's name.
            scratch = directory / scratch_name(step, "pruned")
            path.rename(scratch)
            point("ckpt.mid_prune")
            shutil.rmtree(scratch)
            deleted.append(path.name)
    return deleted
