"""Files that outlive a crash of the machine, and are named when the disk does not take them."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def append_line(path: Path, line: str) -> None:
    """Append a durable line to a file, whole or not at all. Raises OSError with the file's name."""
    rest = f"{line}\n".encode()
    with naming(path), path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        except OSError:
            os.ftruncate(file.fileno(), size)  # half a line would spoil the next one
            raise


@contextmanager
def naming(path: Path) -> Generator[None]:
    """Within it, an OSError names ``path``: that of a write names nothing."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
