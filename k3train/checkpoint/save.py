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
from k3train.checkpoint.finite import check_finite
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
    write_durably,
    write_manifest,
)
from k3train.checkpoint.reader import PlainReader
from k3train.checkpoint.stage import TRAIN_STATE, Staged, stage
from k3train.checkpoint.state import layout_identity
from k3train.checkpoint.trust import private_files
from k3train.checkpoint.writer import Status, Writer, Written, write
from k3train.config.durable import sync_folder
from k3train.faults import point
from k3train.optim.build import allocate_state, optimizer_steps
from k3train.parallel.groups import Groups

_POLL_SECONDS = 0.05

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """What a checkpoint is made of and where it goes; every rank has one."""

    directory: Path
    """Folder of the checkpoints."""
    chunks: Sequence[Any]
    """This rank's model chunks, wrapped in megatron-core's DistributedDataParallel."""
    optimizer: Any
    train_state: dict[str, Any]
    """JSON data: step, tokens, stage, data position, whatever the caller needs to continue."""
    groups: Groups
    keep: int
    """Complete checkpoints that stay, newest first, besides the milestones."""
    milestone: bool = False
    reach: int = 0
    """Steps that the run may have to go back: see ``prune``."""


def save_checkpoint(save: Save) -> Path:
    """Write the checkpoint of ``save.train_state["step"]`` and return its folder.

    The folder is written under a temporary name, every file is digested while it is written and read back by
    the rank that wrote it, and only then renamed; afterwards older checkpoints are deleted. When a good
    checkpoint of the same state exists, nothing is written again.
    Raises CheckpointNotWritten on every rank when any rank fails, and NotFinite when the state holds NaN or
    infinity; older checkpoints are then untouched.
    Every rank of the world must call this.
    """
    begun = _prepare(save)
    if isinstance(begun, Path):
        return begun
    written: list[Written] = []
    with private_files(), _or_not_written(begun.final, begun.staged.folder):
        every_rank(lambda: written.append(write(begun.staged)))
    return _commit_everywhere(begun, written[0])


def begin_save(save: Save) -> PendingSave:
    """Copy the state to the host and let a process of its own write it: see ``save_checkpoint``.

    The files are bit for bit those of a save that waits. Raises CheckpointNotWritten on every rank when the
    copying fails on one, and NotFinite as ``save_checkpoint``. Every rank of the world must call this.
    """
    begun = _prepare(save)
    if isinstance(begun, Path):
        return PendingSave(None, None, begun)
    with private_files(), _or_not_written(begun.final, begun.staged.folder):
        writers: list[Writer] = []
        every_rank(lambda: writers.append(Writer(lambda: write(begun.staged))))
    return PendingSave(begun, writers[0], None)


class PendingSave:
    """A checkpoint that other processes are writing. It is no checkpoint before ``poll`` has returned it."""

    def __init__(self, begun: _Begun | None, writer: Writer | None, done: Path | None) -> None:
        self._begun, self._writer, self._done = begun, writer, done

    @property
    def writer_pid(self) -> int | None:
        """Process that writes this rank's files; None when they were there already."""
        return self._writer.pid if self._writer else None

    def poll(self) -> Path | None:
        """The checkpoint's folder once every rank's files are written and it is committed; None before.

        Raises CheckpointNotWritten on every rank as soon as one rank's writer has failed or died. Every rank
        of the world must call this.
        """
        if self._done or self._begun is None or self._writer is None:
            return self._done
        status = _worst(self._writer.status())
        if status is Status.running:
            return None
        if status is Status.failed:
            writer = self._writer
            with _or_not_written(self._begun.final, self._begun.staged.folder):
                every_rank(lambda: writer.result() if writer.status() is Status.failed else writer.end())
        self._done = _commit_everywhere(self._begun, self._writer.result())
        self._begun = None
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


@dataclass(frozen=True, slots=True)
class _Begun:
    """One checkpoint on its way to the disk."""

    save: Save
    staged: Staged

    @property
    def step(self) -> int:
        return self.save.train_state["step"]

    @property
    def final(self) -> Path:
        return _final(self.save)


def _final(save: Save) -> Path:
    return save.directory / step_name(save.train_state["step"])


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


def _prepare(save: Save) -> _Begun | Path:
    """The save, staged; or the folder of a good checkpoint of the same state."""
    final = _final(save)
    allocate_state(save.optimizer)
    check_finite(save.train_state["step"], save.chunks, save.optimizer)
    record = json.dumps(_record(save), sort_keys=True, indent=1).encode()
    if _saved_before(final, record, save.milestone):
        return final
    with private_files(), _or_not_written(final):
        scratch = every_rank(lambda: _new_scratch(save.directory, save.train_state["step"]))[0]
    with _or_not_written(final, scratch):
        staged: list[Staged] = []
        every_rank(lambda: staged.append(stage(scratch, save.chunks, save.optimizer, save.groups, record)))
    return _Begun(save, staged[0])


def _record(save: Save) -> dict[str, Any]:
    return {
        "train": save.train_state,
        "optimizer_steps": max(every_rank(lambda: optimizer_steps(save.optimizer))),
        "layout": layout_identity(save.groups),
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


def _commit_everywhere(begun: _Begun, written: Written) -> Path:
    """Make the checkpoint of all ranks' files; every rank of the world must call this."""
    with private_files(), _or_not_written(begun.final, begun.staged.folder):
        gathered = gather_on_first(written)
        on_first_rank(lambda: _commit(begun, gathered))
    every_rank(lambda: _prune(begun))
    return begun.final


def _commit(begun: _Begun, written: list[Written]) -> None:
    scratch, final = begun.staged.folder, begun.final
    files: dict[str, FileEntry] = {}
    for own in written:
        files.update(own.files)
    for name in begun.staged.write_index([own.results for own in written]):
        sync_file(scratch / name)
        files[name] = digest_file(scratch / name)
    PlainReader(scratch).read_metadata()  # what could not be loaded again is no checkpoint
    manifest = Manifest(step=begun.step, milestone=begun.save.milestone, files=files)
    # A file that another rank wrote is missing here when the folder is not on a file system all nodes share.
    check_sizes(scratch, manifest)
    point("ckpt.manifest")
    write_manifest(scratch, manifest)
    sync_folder(scratch)
    point("ckpt.rename")
    aside = None
    if final.exists():
        aside = final.with_name(scratch_name(begun.step, "replaced"))
        os.rename(final, aside)
    os.rename(scratch, final)
    point("ckpt.pointer")
    sync_folder(final.parent)
    write_durably(final.parent / LATEST, final.name.encode())
    if aside is not None:
        shutil.rmtree(aside)


def _prune(begun: _Begun) -> None:
    point("ckpt.prune")
    if rank() != 0:
        return
    try:
        prune(begun.final.parent, keep=begun.save.keep, reach=begun.save.reach, written=begun.step)
    except OSError as error:  # the new checkpoint is there and good
        logger.warning("an old checkpoint cannot be deleted: %s: %s", error.filename, error.strerror)
