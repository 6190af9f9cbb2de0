"""What disks, networks, people and programs do to a file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from k3train.checkpoint.folder import step_name


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def flip(path: Path, at: float) -> None:
    content = bytearray(path.read_bytes())
    content[min(int(at * len(content)), len(content) - 1)] ^= 0x40
    path.write_bytes(content)


def take_from(path: Path, step: int) -> None:
    shutil.copyfile(path.parent.parent / step_name(step) / path.name, path)


OTHER = 1
"""Step of the checkpoint beside, whose files are taken."""

DAMAGE: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "empty": lambda path: os.truncate(path, 0),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "one byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "one byte long": lambda path: os.truncate(path, path.stat().st_size + 1),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)) and None,
    "first bit": lambda path: flip(path, 0.0),
    "middle bit": lambda path: flip(path, 0.5),
    "last bit": lambda path: flip(path, 1.0),
    "a folder": replace_by_folder,
    "a pipe": replace_by_pipe,
    "a symlink loop": replace_by_loop,
    "from another checkpoint": lambda path: take_from(path, OTHER),
}
