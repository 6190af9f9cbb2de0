"""Saving: a folder appears under its final name complete, or not at all.

``save_checkpoint`` returns when it is there. ``begin_save`` copies the state and returns; a process of its
own writes while training goes on, and ``PendingSave.poll``, called by every rank once a step, commits.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from k3train.checkpoint.agree import every_rank, gather_on_first, on_first_rank, rank
from k3train.checkpoint.folder import LATEST, prune, scratch_name, step_name, verify
from k3train.checkpoint.manifest import (
    CheckpointError,
    CheckpointNotWritten,
    FileEntry,
    Manifest,
    check_sizes,
    digest_file,
    read_manifest,
    sync_file,
    sync_folder,
    write_durably,
    write_manifest,
)
from k3train.checkpoint.reader import PlainReader
from k3train.checkpoint.stage import TRAIN_STATE, Staged, stage
from k3train.checkpoint.state import layout_identity
from k3train.checkpoint.trust import private_files
from k3train.checkpoint.writer import Status, Writer, Written, write
from k3train.faults import point
from k3train.optim.build import allocate_state, optimizer_steps
from k3train.parallel.groups import Groups

_POLL_SECONDS = 0.05

logger = logging.getLogger(__name__)


def save_checkpoint(
    directory: Path,
    *,
    chunks: Sequence[Any],
    optimizer: Any,
    train_state: dict[str, Any],
    groups: Groups,
    keep: int,
    milestone: bool = False,
) -> Path:
    """Write the checkpoint of ``train_state["step"]`` into ``directory`` and return its folder.

    ``train_state`` is JSON data: step, tokens, stage, data position, fingerprint, whatever the caller needs
    to continue. The folder is written under a temporary name, every file is digested while it is written and
    read back by the rank that wrote it, and only then renamed; afterwards all but the newest ``keep``
    complete checkpoints and the milestones are deleted. When a good checkpoint of the same state exists,
    nothing is written again.
    Raises CheckpointNotWritten on every rank when any rank fails; older checkpoints are then untouched.
    Every rank of the world must call this.
    """
    save = _prepare(directory, chunks, optimizer, train_state, groups, keep, milestone)
    if isinstance(save, Path):
        return save
    written: list[Written] = []
    with private_files(), _or_not_written(save.final, save.staged.folder):
        every_rank(lambda: written.append(write(save.staged)))
    return _commit_everywhere(save, written[0])


def begin_save(
    directory: Path,
    *,
    chunks: Sequence[Any],
    optimizer: Any,
    train_state: dict[str, Any],
    groups: Groups,
    keep: int,
    milestone: bool = False,
) -> PendingSave:
    """Copy the state to the host and let a process of its own write it: see ``save_checkpoint``.

    The files are bit for bit those of a save that waits. Raises CheckpointNotWritten on every rank when the
    copying fails on one. Every rank of the world must call this.
    """
    save = _prepare(directory, chunks, optimizer, train_state, groups, keep, milestone)
    if isinstance(save, Path):
        return PendingSave(None, None, save)
    with private_files(), _or_not_written(save.final, save.staged.folder):
        writers: list[Writer] = []
        every_rank(lambda: writers.append(Writer(lambda: write(save.staged))))
    return PendingSave(save, writers[0], None)


class PendingSave:
    """A checkpoint that other processes are writing. It is no checkpoint before ``poll`` has returned it."""

    def __init__(self, save: _Save | None, writer: Writer | None, done: Path | None) -> None:
        self._save, self._writer, self._done = save, writer, done

    @property
    def writer_pid(self) -> int | None:
        """Process that writes this rank's files; None when they were there already."""
        return self._writer.pid if self._writer else None

    def poll(self) -> Path | None:
        """The checkpoint's folder once every rank's files are written and it is committed; None before.

        Raises CheckpointNotWritten on every rank as soon as one rank's writer has failed or died. Every rank
        of the world must call this.
        """
        if self._done or self._save is None or self._writer is None:
            return self._done
        status = _worst(self._writer.status())
        if status is Status.running:
            return None
        if status is Status.failed:
            writer = self._writer
            with _or_not_written(self._save.final, self._save.staged.folder):
                every_rank(lambda: writer.result() if writer.status() is Status.failed else writer.end())
        self._done = _commit_everywhere(self._save, self._writer.result())
        self._save = None
        return self._done

    def wait(self) -> Path:
        """The checkpoint's folder, as soon as it is committed: see ``poll``."""
        while (path := self.poll()) is None:
            time.sleep(_POLL_SECONDS)
        return path

    def end(self) -> None:
        """Kill this rank's writer; what it has written is cleared away at the next start."""
        if self._writer:
            self._writer.end()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Save:
    """One checkpoint on its way to the disk."""

    final: Path
    staged: Staged
    step: int
    keep: int
    milestone: bool


@contextmanager
def _or_not_written(final: Path, scratch: Path | None = None) -> Iterator[None]:
    """Turn an error that every rank has into CheckpointNotWritten, and take away what was half written."""
    try:
        yield
    except CheckpointError as error:
        if scratch is not None:
            on_first_rank(lambda: shutil.rmtree(scratch, ignore_errors=True))
        raise CheckpointNotWritten(
            f"checkpoint {final.name} was not written: {error} "
            f"({_free(final.parent)}; older checkpoints are untouched)"
        ) from error


def _free(directory: Path) -> str:
    try:
        free = shutil.disk_usage(directory).free
    except OSError as error:
        return f"{directory}: {error.strerror}"
    return f"{free} bytes, {free / 2**30:.2f} GiB, are free in {directory}"


def _prepare(
    directory: Path,
    chunks: Sequence[Any],
    optimizer: Any,
    train_state: dict[str, Any],
    groups: Groups,
    keep: int,
    milestone: bool,
) -> _Save | Path:
    """The save, staged; or the folder of a good checkpoint of the same state."""
    step = train_state["step"]
    final = directory / step_name(step)
    allocate_state(optimizer)
    record = json.dumps(_record(optimizer, train_state, groups), sort_keys=True, indent=1).encode()
    if _saved_before(final, record, milestone):
        return final
    with private_files(), _or_not_written(final):
        scratch = every_rank(lambda: _new_scratch(directory, step))[0]
    with _or_not_written(final, scratch):
        staged: list[Staged] = []
        every_rank(lambda: staged.append(stage(scratch, chunks, optimizer, groups, record)))
    return _Save(final=final, staged=staged[0], step=step, keep=keep, milestone=milestone)


def _record(optimizer: Any, train_state: dict[str, Any], groups: Groups) -> dict[str, Any]:
    return {
        "train": train_state,
        "optimizer_steps": max(every_rank(lambda: optimizer_steps(optimizer))),
        "layout": layout_identity(groups),
        "versions": {name: version(name) for name in ("torch", "megatron-core", "numpy")},
    }


def _saved_before(final: Path, record: bytes, milestone: bool) -> bool:
    """Whether a good checkpoint of exactly this state exists; it becomes a milestone if this one is."""

    def same_state() -> bool:
        path = final / TRAIN_STATE
        return path.is_file() and path.read_bytes() == record

    if not on_first_rank(same_state):
        return False
    try:
        verify(final)
    except CheckpointError:
        return False

    def mark() -> None:
        manifest = read_manifest(final)
        if milestone and not manifest.milestone:
            write_manifest(final, replace(manifest, milestone=True))

    on_first_rank(mark)
    return True


def _new_scratch(directory: Path, step: int) -> Path:
    """The folder to write into; the first rank's is the one that counts, and the only one that is made."""
    point("ckpt.begin")
    scratch = directory / scratch_name(step, "tmp")
    if rank() == 0:
        scratch.mkdir(parents=True)
    return scratch


def _worst(status: Status) -> Status:
    """The highest status of all ranks; every rank must call this."""
    value = torch.tensor([status], dtype=torch.int32, device=torch.cuda.current_device())
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return Status(int(value.item()))


def _commit_everywhere(save: _Save, written: Written) -> Path:
    """Make the checkpoint of all ranks' files; every rank of the world must call this."""
    with private_files(), _or_not_written(save.final, save.staged.folder):
        gathered = gather_on_first(written)
        on_first_rank(lambda: _commit(save, gathered))
    every_rank(lambda: _prune(save))
    return save.final


def _commit(save: _Save, written: list[Written]) -> None:
    scratch, final = save.staged.folder, save.final
    files: dict[str, FileEntry] = {}
    for own in written:
        files.update(own.files)
    for name in save.staged.write_index([own.results for own in written]):
        sync_file(scratch / name)
        files[name] = digest_file(scratch / name)
    PlainReader(scratch).read_metadata()  # what could not be loaded again is no checkpoint
    manifest = Manifest(step=save.step, milestone=save.milestone, files=files)
    # A file that another rank wrote is missing here when the folder is not on a file system all nodes share.
    check_sizes(scratch, manifest)
    point("ckpt.manifest")
    write_manifest(scratch, manifest)
    sync_folder(scratch)
    point("ckpt.rename")
    aside = None
    if final.exists():
        aside = final.with_name(scratch_name(save.step, "replaced"))
        os.rename(final, aside)
    os.rename(scratch, final)
    point("ckpt.pointer")
    sync_folder(final.parent)
    write_durably(final.parent / LATEST, final.name.encode())
    if aside is not None:
        shutil.rmtree(aside)


def _prune(save: _Save) -> None:
    point("ckpt.prune")
    if rank() != 0:
        return
    try:
        prune(save.final.parent, keep=save.keep)
    except OSError as error:  # the new checkpoint is there and good
        logger.warning("an old checkpoint cannot be deleted: %s: %s", error.filename, error.strerror)
