"""Writing a rank's files, here or in a process of their own while training goes on."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item
from torch.distributed.checkpoint.storage import WriteResult

from k3train.checkpoint.agree import describe
from k3train.checkpoint.manifest import CheckpointError, DigestingFile, FileEntry, digest_file
from k3train.checkpoint.stage import Shard, Staged
from k3train.faults import point

_PR_SET_PDEATHSIG = 1
_NICENESS = 10


@dataclass(frozen=True, slots=True)
class Written:
    """What one rank has written."""

    files: dict[str, FileEntry]
    results: list[WriteResult]
    """Where each tensor lies, for torch's index."""


def write(staged: Staged) -> Written:
    """Write, make durable and read back every file of this rank; each is digested while it is written.

    Raises CheckpointError when the disk returns other bytes than were written, and OSError.
    """
    files: dict[str, FileEntry] = {}
    results: list[WriteResult] = []
    for shard in staged.shards:
        files[shard.name] = _write_shard(staged.folder, shard, results)
    point("ckpt.after_shard_write")
    for name, content in staged.small.items():
        with DigestingFile(staged.folder / name) as file:
            file.write(content)
            files[name] = file.finish()
    for name, entry in files.items():
        _check_on_disk(staged.folder / name, entry)
    return Written(files, results)


def _write_shard(folder: Path, shard: Shard, results: list[WriteResult]) -> FileEntry:
    with DigestingFile(folder / shard.name) as file:
        try:
            for item, data in shard.items:
                point("ckpt.shard")
                results.append(
                    _write_item(
                        shard.transforms, file, data, item, shard.name, SerializationFormat.TORCH_SAVE
                    )
                )
        except RuntimeError as error:
            # torch's archive writer answers a failed write with a sentence about positions.
            raise file.error or error from error
        return file.finish()


def _check_on_disk(path: Path, entry: FileEntry) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)  # read what the disk has, not the cache
    finally:
        os.close(handle)
    if digest_file(path) != entry:
        raise CheckpointError(f"{path} reads back otherwise than it was written: check its disk")


class Status(IntEnum):
    """How far a writer is; of several ranks' the highest counts."""

    done = 0
    running = 1
    failed = 2


class Writer:
    """A forked process that runs ``work`` once, beside the training that goes on.

    The fork sees every CPU tensor as it is now, whatever training does to it afterwards, and must not touch a
    GPU. It ends with this process; this process can end it at any moment.
    """

    def __init__(self, work: Callable[[], Written]) -> None:
        parent = os.getpid()
        self._receiver, sender = Pipe(duplex=False)
        with warnings.catch_warnings():
            # Threads of torch and gloo do not exist in the child, which calls neither.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            _run(work, sender, parent)
        sender.close()
        self._outcome: Written | str | None = None

    def status(self) -> Status:
        """Whether the work is done, without waiting."""
        if self._outcome is None and self._receiver.poll():
            try:
                outcome = self._receiver.recv()
            except (EOFError, OSError):
                outcome = None
            code = self._reap()
            self._outcome = outcome or f"the process that writes for this rank ended with {code}"
        if self._outcome is None:
            return Status.running
        return Status.failed if isinstance(self._outcome, str) else Status.done

    def result(self) -> Written:
        """What has been written. Raises CheckpointError with the reason when the work failed."""
        assert self._outcome is not None, "the writer is still running"
        if isinstance(self._outcome, str):
            raise CheckpointError(self._outcome)
        return self._outcome

    def end(self) -> None:
        """Kill the process if it still runs."""
        if self._outcome is None:
            os.kill(self.pid, signal.SIGKILL)
            self._reap()
            self._outcome = "the save was given up"

    def _reap(self) -> str:
        self._receiver.close()
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        return signal.Signals(-code).name if code < 0 else f"code {code}"


def _run(work: Callable[[], Written], sender: Connection, parent: int) -> NoReturn:
    code = 1
    try:
        _leave_training(parent)
        outcome: Any
        try:
            outcome = work()
        except Exception as error:  # the rank that trains must hear of it
            outcome = describe(error)
        sender.send(outcome)
        code = 0
    finally:
        os._exit(code)  # nothing of what this process shares with its parent may be torn down


def _leave_training(parent: int) -> None:
    gc.disable()  # it might free a GPU tensor, which only the parent can
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # sent to all of a job; whether to stop, the parent decides
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.nice(_NICENESS)
    torch.set_num_threads(1)  # OpenMP's threads are the parent's
