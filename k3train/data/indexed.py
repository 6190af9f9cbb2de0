"""Read and write Megatron's indexed token files (.bin/.idx, version 1) with numpy alone.

The .idx holds a header, the length of every sequence, where it starts in the .bin, and which sequences make
up a document; the .bin holds nothing but tokens. Reads go through ``pread``: a file that shrinks under
a running job becomes an error that names it, where a memory map would kill the process.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from types import TracebackType

import numpy as np

from k3train.config.problems import BadInput

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<QBQQ")
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_READ_TRIES = 3


REBUILD = "copy it again or build it again (the tiny corpus: python data/build.py tiny)"
"""What to do about a corpus that is not whole; ``it`` is the corpus or one of its files."""


class CorpusError(BadInput):
    """A corpus is broken, unfinished or not the one expected; the message says which file and what to do."""


def token_dtype(vocab_size: int) -> type[np.generic]:
    """The narrowest token type that Megatron also picks for this vocabulary."""
    return np.uint16 if vocab_size < 65500 else np.int32


def index_path(folder: Path) -> Path:
    """The .idx of a corpus folder."""
    return folder / "tokens.idx"


def tokens_path(folder: Path) -> Path:
    """The .bin of a corpus folder."""
    return folder / "tokens.bin"


class IndexedReader:
    """Documents of one .bin/.idx pair. Opening checks the whole index and both sizes; reading comes later."""

    def __init__(self, bin_path: Path, idx_path: Path) -> None:
        """Open both files; raises CorpusError when either is missing, cut short or contradicts the other."""
        self.bin_path = bin_path
        for path in (bin_path, idx_path):
            if not path.is_file():
                raise CorpusError(f"{path} does not exist; {REBUILD}.")
        self.dtype, lengths, pointers, documents = _read_index(idx_path)
        itemsize = self.dtype.itemsize
        ends = np.cumsum(lengths, dtype=np.int64) * itemsize
        if len(lengths) and not np.array_equal(pointers, ends - lengths.astype(np.int64) * itemsize):
            bad = int(np.flatnonzero(pointers != ends - lengths.astype(np.int64) * itemsize)[0])
            raise CorpusError(
                f"{idx_path} is damaged: sequence {bad} does not start where the one before it ends."
            )
        expected = int(ends[-1]) if len(ends) else 0
        actual = bin_path.stat().st_size
        if expected != actual:
            raise CorpusError(
                f"{bin_path} has {actual:,} bytes where its index {idx_path.name} says {expected:,}; "
                f"{REBUILD}."
            )
        borders = np.concatenate([[0], ends])[documents] // itemsize
        self.starts: np.ndarray = borders[:-1]
        """int64 [documents]: first token of each document in the .bin."""
        self.lengths: np.ndarray = np.diff(borders)
        """int64 [documents]: tokens in each document."""
        self._file = os.open(bin_path, os.O_RDONLY)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens in the .bin."""
        return int(self.lengths.sum())

    def read(self, document: int, start: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens [start, start + length) of a document, or from start to its end, in the file's dtype."""
        length = int(self.lengths[document]) - start if length is None else length
        assert 0 <= start <= start + length <= self.lengths[document], (document, start, length)
        out = np.empty(length, self.dtype)
        view = memoryview(out.view(np.uint8))
        offset = (int(self.starts[document]) + start) * self.dtype.itemsize
        done = 0
        while done < len(view):
            got = self._pread(view[done:], offset + done)
            if got == 0:
                raise CorpusError(
                    f"{self.bin_path} ends at byte {offset + done:,} in the middle of document {document}: "
                    "it was cut short after the run opened it."
                )
            done += got
        return out

    def _pread(self, view: memoryview, offset: int) -> int:
        for attempt in range(1, _READ_TRIES + 1):
            try:
                return os.preadv(self._file, [view], offset)
            except OSError as error:
                if attempt == _READ_TRIES:
                    raise CorpusError(
                        f"reading {self.bin_path} at byte {offset:,} failed {attempt} times: {error}."
                    ) from error
                time.sleep(0.2 * 4**attempt)
        raise AssertionError

    def close(self) -> None:
        """Close the .bin; the reader cannot be used afterwards."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _read_index(path: Path) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """Dtype, lengths int32 [s], byte pointers int64 [s] and document borders int64 [documents + 1]."""
    raw = path.read_bytes()
    head = len(_MAGIC) + _HEADER.size
    if raw[: len(_MAGIC)] != _MAGIC or len(raw) < head:
        raise CorpusError(f"{path} is not a Megatron index: its first bytes are wrong.")
    version, code, sequences, borders = _HEADER.unpack_from(raw, len(_MAGIC))
    if version != 1 or code not in _DTYPES:
        raise CorpusError(f"{path} has version {version} and token type {code}; only version 1 is known.")
    sizes = list(accumulate([head, 4 * sequences, 8 * sequences, 8 * borders]))
    # Multimodal indices end with one more byte a sequence (its mode), which text does not need.
    if len(raw) not in (sizes[-1], sizes[-1] + sequences):
        raise CorpusError(f"{path} has {len(raw):,} bytes where its header says {sizes[-1]:,}; {REBUILD}.")
    lengths = np.frombuffer(raw, np.int32, sequences, sizes[0])
    pointers = np.frombuffer(raw, np.int64, sequences, sizes[1])
    documents = np.frombuffer(raw, np.int64, borders, sizes[2])
    ordered = borders > 0 and documents[0] == 0 and documents[-1] == sequences
    if not ordered or np.any(np.diff(documents) < 0) or np.any(lengths < 0):
        raise CorpusError(f"{path} is damaged: its document borders or lengths are out of order.")
    return np.dtype(_DTYPES[code]), lengths, pointers, documents


class IndexedWriter:
    """Write documents to a .bin/.idx pair; both appear under their names only when the block ends well."""

    def __init__(self, bin_path: Path, idx_path: Path, dtype: type[np.generic]) -> None:
        self._bin_path, self._idx_path = bin_path, idx_path
        self._dtype = np.dtype(dtype)
        self._code = next(code for code, known in _DTYPES.items() if np.dtype(known) == self._dtype)
        self._lengths: list[int] = []
        self._temporary = _temporary(bin_path)
        self._file = open(self._temporary, "wb")  # noqa: SIM115  closed by __exit__

    def __enter__(self) -> IndexedWriter:
        return self

    def add(self, tokens: np.ndarray | Iterable[int]) -> None:
        """Append one document; raises CorpusError when it is empty or a token does not fit the dtype."""
        wide = np.asarray(tokens, np.int64)
        largest = int(np.iinfo(self._dtype.name).max)
        if not 0 < len(wide) <= np.iinfo(np.int32).max:
            raise CorpusError(f"document {len(self._lengths)} for {self._bin_path} has {len(wide)} tokens.")
        if wide.min() < 0 or wide.max() > largest:
            raise CorpusError(
                f"document {len(self._lengths)} for {self._bin_path} has a token outside 0..{largest}."
            )
        self._file.write(wide.astype(self._dtype).tobytes())
        self._lengths.append(len(wide))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
                os.replace(self._temporary, self._bin_path)
                write_atomically(self._idx_path, self._index())
        finally:
            self._file.close()
            self._temporary.unlink(missing_ok=True)

    def _index(self) -> bytes:
        lengths = np.array(self._lengths, np.int32)
        ends = np.cumsum(lengths, dtype=np.int64) * self._dtype.itemsize
        pointers = ends - lengths.astype(np.int64) * self._dtype.itemsize
        documents = np.arange(len(lengths) + 1, dtype=np.int64)
        head = _MAGIC + _HEADER.pack(1, self._code, len(lengths), len(documents))
        return head + lengths.tobytes() + pointers.tobytes() + documents.tobytes()


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that its name only ever shows the whole content."""
    temporary = _temporary(path)
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")
