"""The file that a run of the benchmark writes: claimed before anything is measured, never an old one."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from k3train.config.problems import BadInput, Unavailable


@contextmanager
def claimed(given: Path | None, stem: str) -> Generator[Path]:
    """Within it, a new file that is this run's; it goes again when nothing has been written to it.

    It is ``given``, else the first free name of ``stem.json``, ``stem-2.json`` and so on. Raises BadInput
    when ``given`` is there already and Unavailable when no file can be made there.
    """
    out = _free(stem) if given is None else _claim(given)
    if out is None:
        kind = "is a folder" if given and given.is_dir() else "exists and would be replaced"
        raise BadInput(f"--out {given} {kind}; give a new file, or move that one away first")
    try:
        yield out
    finally:
        if out.is_file() and not out.stat().st_size:
            out.unlink()


def _free(stem: str) -> Path:
    names = (f"{stem}{f'-{number}' if number > 1 else ''}.json" for number in count(1))
    return next(out for name in names if (out := _claim(Path(name))))


def _claim(path: Path) -> Path | None:
    """``path``, made as an empty file, or None when it is there already, whatever it is."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.open("x").close()
        except FileExistsError:
            return None
    except OSError as error:
        raise unwritable(path, error) from None
    return path


def unwritable(path: Path, error: OSError) -> Unavailable:
    """What to raise when ``path`` could not be written."""
    reason = f"{path.parent} is no folder" if isinstance(error, FileExistsError) else error.strerror
    return Unavailable(f"{path} cannot be written: {reason}; give a file that can be with --out")
