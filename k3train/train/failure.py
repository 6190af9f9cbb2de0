"""What ended a rank, for its supervisor to read: an error of the program comes again, a fault may pass."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterable
from pathlib import Path

from k3train.backend.machine_faults import is_machine_fault

FOLDER = "failures"
"""Folder in the run's folder with one file for each rank that an error of the program has ended."""


def may_pass(error: Exception) -> bool:
    """Whether another start may be spared the error: it is one of memory, a device, a disk or the network."""
    return isinstance(error, OSError) or is_machine_fault(error)


def note_failure(run_dir: Path, rank: int, error: Exception) -> None:
    """Leave word of the error that ends this rank, unless it may pass: its class, its place and its notes."""
    if may_pass(error):
        return
    frame = traceback.extract_tb(error.__traceback__)[-1]
    notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
    with contextlib.suppress(OSError):
        _file(run_dir, rank).parent.mkdir(exist_ok=True)
        _file(run_dir, rank).write_text(
            f"{type(error).__name__} in {Path(frame.filename).name}:{frame.lineno}{notes}"
        )


def forget_failures(run_dir: Path, ranks: Iterable[int]) -> None:
    """Remove what ranks have left, before they start."""
    for rank in ranks:
        with contextlib.suppress(OSError):
            _file(run_dir, rank).unlink()


def read_failures(run_dir: Path, ranks: Iterable[int]) -> set[str]:
    """The errors of the program that have ended any of these ranks."""
    found: set[str] = set()
    for rank in ranks:
        with contextlib.suppress(OSError):
            found.add(_file(run_dir, rank).read_text(errors="replace"))
    return found


def _file(run_dir: Path, rank: int) -> Path:
    return run_dir / FOLDER / f"rank_{rank:05d}.txt"
