"""A corpus folder: Megatron token files, a checksum of every document, and the manifest that seals them.

The manifest is written last, so a folder without one is unfinished. Sizes and structure are checked when a
corpus is opened, each document's checksum when it is first read, and every hash by ``verify``.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from k3train.config.json_file import read_json
from k3train.data.indexed import (
    REBUILD,
    CorpusError,
    IndexedReader,
    IndexedWriter,
    index_path,
    token_dtype,
    tokens_path,
    write_atomically,
)

FORMAT = "k3train corpus 1"


def manifest_path(folder: Path) -> Path:
    """The manifest of a corpus folder."""
    return folder / "manifest.json"


def checksums_path(folder: Path) -> Path:
    """crc32 of each document's bytes: uint32 [documents], nothing else."""
    return folder / "documents.crc32"


@dataclass(kw_only=True, slots=True)
class Manifest:
    """What a finished corpus is made of."""

    name: str
    tokenizer_sha256: str
    """Hash of the tokenizer.json that made the tokens."""
    vocab_size: int
    """Ids of that tokenizer; every token is smaller."""
    special: dict[str, int]
    """Special tokens by name: ``pad``, ``bos`` and ``eod`` at least."""
    documents: int
    tokens: int
    longest_document_tokens: int
    text_bytes: int
    """UTF-8 bytes that were tokenised; 0 when that is not known."""
    licences: dict[str, str]
    """Licence of each origin."""
    command: str
    """Command that built the corpus."""
    files: dict[str, dict[str, object]] = field(default_factory=dict)
    """Size in bytes and sha256 of each file."""


def write_corpus(
    folder: Path,
    documents: Iterable[np.ndarray],
    *,
    tokenizer_sha256: str,
    vocab_size: int,
    special: dict[str, int],
    licences: dict[str, str],
    command: str,
    text_bytes: int = 0,
) -> Manifest:
    """Write documents of tokens as a sealed corpus. An old manifest goes first. Raises CorpusError."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest_path(folder).unlink(missing_ok=True)
    with IndexedWriter(tokens_path(folder), index_path(folder), token_dtype(vocab_size)) as writer:
        for tokens in documents:
            writer.add(tokens)
    return seal(
        folder,
        tokenizer_sha256=tokenizer_sha256,
        vocab_size=vocab_size,
        special=special,
        licences=licences,
        command=command,
        text_bytes=text_bytes,
    )


def seal(
    folder: Path,
    *,
    tokenizer_sha256: str,
    vocab_size: int,
    special: dict[str, int],
    licences: dict[str, str],
    command: str,
    text_bytes: int = 0,
) -> Manifest:
    """Write the checksums of a folder's token files and, last, the manifest. Raises CorpusError."""
    reader = IndexedReader(tokens_path(folder), index_path(folder))
    try:
        checksums = np.empty(len(reader), np.uint32)
        for document in range(len(reader)):
            tokens = reader.read(document)
            if int(tokens.max(initial=0)) >= vocab_size or int(tokens.min(initial=0)) < 0:
                raise CorpusError(
                    f"document {document} of {tokens_path(folder)} has a token outside the tokenizer's "
                    f"{vocab_size} ids; it was made with another tokenizer."
                )
            checksums[document] = zlib.crc32(tokens.tobytes())
    finally:
        reader.close()
    write_atomically(checksums_path(folder), checksums.tobytes())
    manifest = Manifest(
        name=folder.name,
        tokenizer_sha256=tokenizer_sha256,
        vocab_size=vocab_size,
        special=special,
        documents=len(reader),
        tokens=reader.num_tokens,
        longest_document_tokens=int(reader.lengths.max(initial=0)),
        text_bytes=text_bytes,
        licences=licences,
        command=command,
        files={
            path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
            for path in (tokens_path(folder), index_path(folder), checksums_path(folder))
        },
    )
    text = json.dumps({"format": FORMAT, **asdict(manifest)}, indent=2, ensure_ascii=False)
    write_atomically(manifest_path(folder), text.encode())
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a corpus; raises CorpusError when it is missing or of another format."""
    path = manifest_path(folder)
    if not folder.exists():
        raise CorpusError(
            f"{folder} does not exist; correct the path or build the corpus "
            "(the tiny one: python data/build.py tiny)."
        )
    if not path.is_file():
        if inside := sorted(str(each.parent) for each in folder.glob(f"*/{path.name}")):
            raise CorpusError(f"{folder} is not a corpus but holds some; give {' or '.join(inside)}.")
        raise CorpusError(f"{folder} has no {path.name}, so it is unfinished or no corpus; {REBUILD}.")
    values = read_json(path, CorpusError, f"{REBUILD}.")
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
        raise CorpusError(f"{path} is not of format '{FORMAT}'; {REBUILD}.")
    if wrong := _wrong_entry(values):
        raise CorpusError(f"{path} is damaged: {wrong}; {REBUILD}.")
    return Manifest(**values)


def _wrong_entry(values: dict[str, Any]) -> str:
    """What is wrong with the entries of a manifest, in a few words; empty when nothing is."""
    known = {each.name: each for each in fields(Manifest)}
    for name in sorted(known.keys() ^ values.keys()):
        return f"it has no {name}" if name in known else f"it has {name}, which is no entry of a manifest"
    kinds = {"int": (int, "a whole number from 0"), "str": (str, "a text")}
    for name, each in known.items():
        kind, rule = kinds.get(str(each.type), (dict, "a mapping"))
        if type(values[name]) is not kind or (kind is int and values[name] < 0):
            return f"{name} is not {rule}"
    for name, entry in values["files"].items():
        if not isinstance(entry, dict) or not entry.keys() >= {"bytes", "sha256"}:
            return f"files.{name} does not tell bytes and sha256"
    return _wrong_token(values["special"], values["vocab_size"])


def _wrong_token(special: dict[str, object], vocab_size: int) -> str:
    if vocab_size < 1:
        return "vocab_size is not a whole number from 1"
    for name in ("pad", "bos", "eod"):
        if name not in special:
            return f"special has no {name}"
    for name, token in special.items():
        if type(token) is not int or not 0 <= token < vocab_size:
            return f"special.{name} is none of its vocabulary's ids, 0 to {vocab_size - 1}"
    return ""


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Compare the size of every file with the manifest; raises CorpusError with both sizes."""
    for name, known in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise CorpusError(f"{path} is missing; {REBUILD}.")
        if path.stat().st_size != known["bytes"]:
            raise CorpusError(
                f"{path} has {path.stat().st_size:,} bytes where its manifest says {known['bytes']:,}; "
                f"{REBUILD}."
            )


def verify(folder: Path) -> Manifest:
    """Check size and sha256 of every file against the manifest; raises CorpusError that names the file."""
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    for name, known in manifest.files.items():
        if file_sha256(folder / name) != known["sha256"]:
            raise CorpusError(f"{folder / name} does not have the sha256 of its manifest; {REBUILD}.")
    return manifest


def file_sha256(path: Path) -> str:
    """sha256 of a file's content, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Corpus:
    """An opened corpus folder."""

    def __init__(self, folder: Path, *, vocab_size: int, allow_unsealed: bool = False) -> None:
        """Check and open; ``vocab_size`` is the model's. Raises CorpusError."""
        self.folder = folder
        self._vocab_size = vocab_size
        self._checked: set[int] = set()
        self._checksums: np.ndarray | None = None
        self.manifest: Manifest | None = None
        """None for an unsealed pair of token files."""
        if manifest_path(folder).is_file() or not allow_unsealed:
            self.manifest = read_manifest(folder)
            check_sizes(folder, self.manifest)
            if self.manifest.vocab_size > vocab_size:
                raise CorpusError(
                    f"{folder} was made with {self.manifest.vocab_size:,} token ids but model.vocab_size is "
                    f"{vocab_size:,}; set model.vocab_size to {self.manifest.vocab_size} or more."
                )
            self._checksums = np.fromfile(checksums_path(folder), np.uint32)
        self._reader = IndexedReader(tokens_path(folder), index_path(folder))
        if self.manifest and not self._matches(self.manifest):
            raise CorpusError(f"{index_path(folder)} is not the index its manifest describes; {REBUILD}.")
        self.lengths: np.ndarray = self._reader.lengths
        """int64 [documents]: tokens in each."""
        self.pad = self.manifest.special["pad"] if self.manifest else 0
        """Token id that fills a sequence; it never carries loss."""

    def _matches(self, manifest: Manifest) -> bool:
        lengths = self._reader.lengths
        checksums = 0 if self._checksums is None else len(self._checksums)
        return (
            len(lengths) == manifest.documents == checksums
            and int(lengths.sum()) == manifest.tokens
            and int(lengths.max(initial=0)) == manifest.longest_document_tokens
        )

    @property
    def fingerprint(self) -> str:
        """Hash of the content by its manifest; of an unsealed pair, of the index and the size of the .bin."""
        if self.manifest:
            parts = [f"{name} {known['sha256']}" for name, known in sorted(self.manifest.files.items())]
        else:
            parts = [file_sha256(index_path(self.folder)), str(tokens_path(self.folder).stat().st_size)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def read(self, document: int, start: int, length: int) -> np.ndarray:
        """int32 [length]: tokens of a document from ``start`` on; raises CorpusError when they are damaged.

        The first read of a document checks all of it.
        """
        whole = length == self.lengths[document]
        if self._checksums is not None and document not in self._checked:
            tokens = self._reader.read(document)
            if zlib.crc32(tokens.tobytes()) != self._checksums[document]:
                raise CorpusError(
                    f"document {document} of {tokens_path(self.folder)} does not have the checksum it was "
                    f"written with: the file was changed or damaged; {REBUILD}."
                )
            if not whole:
                self._checked.add(document)
            tokens = tokens[start : start + length]
        else:
            tokens = self._reader.read(document, start, length)
        largest = int(tokens.max(initial=0))
        if largest >= self._vocab_size or int(tokens.min(initial=0)) < 0:
            bad = int(np.flatnonzero((tokens >= self._vocab_size) | (tokens < 0))[0])
            raise CorpusError(
                f"document {document} of {tokens_path(self.folder)} has token {int(tokens[bad])} at place "
                f"{start + bad}, outside model.vocab_size = {self._vocab_size}."
            )
        return tokens.astype(np.int32)

    def close(self) -> None:
        """Close the token file."""
        self._reader.close()
