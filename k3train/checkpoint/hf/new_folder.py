"""A folder that a conversion makes: under its name it is whole or not there."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from k3train.checkpoint.manifest import CheckpointError, CheckpointNotWritten
from k3train.config.durable import sync_folder


def check_new(out: Path) -> None:
    """Raise CheckpointError when ``out`` is there, and CheckpointNotWritten when it cannot be made: before
    anything is read, which may take hours."""
    if os.path.lexists(out):
        raise CheckpointError(f"{out} exists: give a new folder")
    above = next(each for each in out.absolute().parents if os.path.lexists(each))
    if not above.is_dir():
        raise _cannot_make(out, f"{above} is not a folder")
    if not os.access(above, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise _cannot_make(out, f"{above} may not be written")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which becomes ``out`` when the block is through and is removed when it fails.

    Raises CheckpointNotWritten when the disk refuses.
    """
    scratch = out.with_name(f"{out.name}.tmp-{uuid.uuid4().hex}")
    try:
        scratch.mkdir(parents=True)
        yield scratch
        scratch.rename(out)
        sync_folder(out.parent)
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        named = Path(str(error.filename)) if error.filename else scratch
        if scratch in (named, *named.parents) or named in scratch.parents:
            raise _cannot_make(out, error.strerror or str(error)) from error
        raise
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _cannot_make(out: Path, why: str) -> CheckpointNotWritten:
    return CheckpointNotWritten(f"{out} cannot be made: {why}; give OUT a place with rights and room")
