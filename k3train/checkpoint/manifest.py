"""MANIFEST.json: which files a checkpoint consists of and what each must contain.

A checkpoint is good when its manifest is intact and every listed file has its size and digest. Nothing else
decides: neither torch's shard files nor safetensors notice a flipped bit.
"""

from __future__ import annotations

import io
import json
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from k3train.config.durable import sync_folder
from k3train.config.json_file import read_json
from k3train.config.problems import BadInput, Unavailable
from k3train.config.trained import CHECKPOINT_NAME, CHECKPOINTS
from k3train.config.trained import MANIFEST as MANIFEST

FORMAT = 1
"""Version of the folder's format; a reader refuses a newer one."""

PART = ".part"
"""Ending of a small file that is being written; it never bears its final name before it is complete."""

_READ_BYTES = 1 << 23


class CheckpointError(BadInput):
    """A checkpoint cannot be written or read; the message names the file, what is wrong and what to do."""


class CheckpointFault(CheckpointError):
    """Memory, a device or a connection failed while a checkpoint was read or written: nothing is wrong with
    what was given, and another start may be spared it."""


class CheckpointNotWritten(CheckpointError, Unavailable):
    """A checkpoint could not be written; the older ones are as they were."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One file of a checkpoint, relative to its folder."""

    size_bytes: int
    xxh3_128: str
    """Hexadecimal digest of the content."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Content of MANIFEST.json."""

    step: int
    milestone: bool
    """The last checkpoint of a curriculum stage: never pruned."""
    files: dict[str, FileEntry]


def digest_file(path: Path) -> FileEntry:
    """Size and digest of a file, read in pieces."""
    hasher, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            hasher.update(piece)
            size += len(piece)
    return FileEntry(size_bytes=size, xxh3_128=hasher.hexdigest())


class DigestingFile(io.BufferedWriter):
    """A new file that is digested while it is written, front to back."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "xb"), _READ_BYTES)
        self._path, self._hasher = path, xxhash.xxh3_128()
        self.error: OSError | None = None
        """Why writing failed, for callers whose library says it in other words."""

    def write(self, content: Any) -> int:
        """Append ``content``."""
        self._hasher.update(content)
        with self._naming_the_file():
            return super().write(content)

    def flush(self) -> None:
        """Hand the content to the system."""
        with self._naming_the_file():
            super().flush()

    def close(self) -> None:
        """Close; what could not be written before is not tried again."""
        try:
            super().close()
        except OSError:
            if self.error is None:
                raise

    def finish(self) -> FileEntry:
        """Make the content durable; returns size and digest of what was written."""
        with self._naming_the_file():
            self.flush()
            os.fsync(self.fileno())
        return FileEntry(size_bytes=self.tell(), xxh3_128=self._hasher.hexdigest())

    @contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = OSError(error.errno, error.strerror, str(self._path))
            raise self.error from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write MANIFEST.json durably and atomically, with a digest of itself."""
    body = {"format": FORMAT, **asdict(manifest)}
    write_durably(folder / MANIFEST, json.dumps({**body, "self": _self_digest(body)}, indent=1).encode())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder. Raises CheckpointError when it is missing, damaged or too new."""
    path = folder / MANIFEST
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path} is damaged: it is not a file")
        body = read_json(path, CheckpointError, "use an older checkpoint")
        claimed = body.pop("self")
        intact = claimed == _self_digest(body)
    except FileNotFoundError as error:
        raise CheckpointError(_without_manifest(folder)) from error
    except (OSError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not intact:
        raise CheckpointError(f"{path} is damaged: its content does not match its digest")
    try:
        return _manifest(path, body)
    except (KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__} {error}") from error


def _without_manifest(folder: Path) -> str:
    """Why a folder without a manifest is no checkpoint."""
    inside = folder / CHECKPOINTS if (folder / CHECKPOINTS).is_dir() else folder
    found = [path for path in inside.glob("step_*") if CHECKPOINT_NAME.fullmatch(path.name)]
    if found:
        newest = max(found, key=lambda path: int(path.name.partition("_")[2]))
        return f"{folder} holds checkpoints and is none itself: give one of them, such as {newest}"
    return f"{folder / MANIFEST} is missing: this is no checkpoint, or one that was never completed"


def _manifest(path: Path, body: dict[str, Any]) -> Manifest:
    if body["format"] > FORMAT:
        raise CheckpointError(
            f"{path} has format {body['format']}, this k3train reads up to {FORMAT}: use a newer k3train"
        )
    files = {name: FileEntry(**entry) for name, entry in body["files"].items()}
    for name in files:
        if name != os.path.basename(name) or name in ("", ".", ".."):
            raise CheckpointError(f"{path} lists {name!r}, which is no file of its folder")
    return Manifest(step=body["step"], milestone=body["milestone"], files=files)


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raise CheckpointError for the first listed file that is missing or has another size."""
    for name, entry in manifest.files.items():
        _check_size(folder / name, entry)


def check_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raise CheckpointError for the first of ``names`` that is missing or differs in size or content."""
    for name in names:
        path, entry = folder / name, manifest.files[name]
        _check_size(path, entry)
        try:
            found = digest_file(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if found != entry:
            raise CheckpointError(f"{path} is damaged: its content does not match the digest in {MANIFEST}")


def write_durably(path: Path, content: bytes) -> None:
    """Replace ``path`` with ``content``: after a crash it holds the old content or all of the new."""
    temporary = path.with_name(path.name + PART)
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Make a file's content durable."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _check_size(path: Path, entry: FileEntry) -> None:
    try:
        found = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} is missing or unreadable: {error.strerror}") from error
    size = found.st_size
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path} is damaged: it is not a file")
    if size != entry.size_bytes:
        raise CheckpointError(f"{path} has {size} bytes, {MANIFEST} says {entry.size_bytes}")


def _self_digest(body: dict) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())
