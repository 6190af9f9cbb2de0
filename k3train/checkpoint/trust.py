"""Whether a file may be acted on: nobody but this user and root can have put it there or changed it."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from k3train.checkpoint.manifest import CheckpointError

_PRIVATE = 0o077


@contextmanager
def private_files() -> Iterator[None]:
    """Within it, files and folders that this process makes are this user's alone."""
    before = os.umask(_PRIVATE)
    try:
        yield
    finally:
        os.umask(before)


def owned_by_us(path: Path) -> bool:
    """Whether ``path`` itself, and not what a symbolic link points at, is this user's or root's.

    Where the file system gives what this process makes another owner, that is this user too.
    """
    owner = path.lstat().st_uid
    return owner in (0, os.geteuid()) or owner == _uid_in(path.parent)


def check_trusted(checkpoint: Path) -> None:
    """Raise CheckpointError when somebody else can have changed a checkpoint, or put it there.

    That is when it or the folder it lies in can be written by everybody, or it is another user's. A folder
    with the sticky bit, such as /tmp, may hold it.
    """
    try:
        real = checkpoint.resolve(strict=True)
        above = real.parent.stat().st_mode
        if above & stat.S_IWOTH and not above & stat.S_ISVTX:
            raise _open_to_all(real.parent)
        paths = [real, *(Path(entry.path) for entry in os.scandir(real))] if real.is_dir() else [real]
        for path in paths:
            mode = path.lstat().st_mode
            if not stat.S_ISLNK(mode) and mode & stat.S_IWOTH:
                raise _open_to_all(path)
            if not owned_by_us(path):
                raise CheckpointError(
                    f"{path} belongs to user {path.lstat().st_uid}, who could change it while it is read: "
                    "copy the checkpoint and load the copy"
                )
    except (OSError, RuntimeError) as error:  # pathlib answers a loop of links with RuntimeError
        raise CheckpointError(f"{checkpoint} cannot be read: {describe_error(error)}") from error


def describe_error(error: OSError | RuntimeError) -> str:
    """The reason in the system's words."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _open_to_all(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} can be written by everybody on this machine and is not loaded: if nobody has changed it, "
        f"take that right away (chmod -R o-w {path})"
    )


def _uid_in(folder: Path) -> int | None:
    """The user as whom this process writes in ``folder``: some network file systems give it another id."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_uid
    except OSError:
        return None
