"""A run's folder belongs to one start at a time: two would delete and overwrite each other's checkpoints."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from k3train.config import history
from k3train.config.problems import ConfigError, ConfigProblem, Unavailable
from k3train.config.schema import Run
from k3train.monitor.metrics_file import METRICS

LOCK = "lock"
"""File in the run's folder that is locked while the run is in use. Its content only says by whom."""

STOP_FILE = "STOP"
"""File in the run's folder that asks the run to stop: launchers make it, rank 0 looks for it."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def claimed(run: Run) -> Iterator[None]:
    """Make the run's folder and keep every other start out of it until the block, or this process, ends.

    Raises ConfigError when the folder is in use, and Unavailable when it cannot be made or written, or a
    file in it to which the run appends cannot.
    """
    path = Path(run.dir) / LOCK
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise cannot_write(run, error) from error
    try:
        _lock(run, path, handle)
        _check_writable(run)
        yield
    finally:
        os.close(handle)


def _lock(run: Run, path: Path, handle: int) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = path.read_text(errors="replace").strip() or "another process"
        rule = f"is in use by {owner}"
        fix = f"Let it end (the file {path.with_name(STOP_FILE)} stops it), or give this run another name"
        raise ConfigError([ConfigProblem("dir", run.dir, rule, fix, "run.in-use")]) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning("%s cannot be locked: make sure that this run is not started twice at once", path)
    try:
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        os.fsync(handle)
    except OSError as error:
        raise cannot_write(run, error) from error


def _check_writable(run: Run) -> None:
    folder = Path(run.dir)
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise cannot_write(run, OSError(error.errno, error.strerror, str(folder))) from error
    for name in (METRICS, history.HISTORY):
        path = folder / name
        try:
            if path.exists():
                path.open("ab").close()
        except OSError as error:
            raise cannot_write(run, error) from error


def cannot_write(run: Run, error: OSError) -> Unavailable:
    """That the run's folder, or a file that belongs to the run, cannot be made or written, and what to do."""
    return Unavailable(
        f"dir = {run.dir} cannot hold the run: {error.strerror} ({error.filename or run.dir}); "
        "give dir a folder that can be made and written, on a disk with room"
    )
