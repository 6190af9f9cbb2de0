"""Megatron token files: round trip, the other implementation, and every way a file can be broken."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3train.data.indexed import CorpusError, IndexedReader, IndexedWriter, token_dtype


def write(folder: Path, documents: list[list[int]], dtype: type[np.generic] = np.uint16) -> tuple[Path, Path]:
    paths = folder / "tokens.bin", folder / "tokens.idx"
    with IndexedWriter(*paths, dtype) as writer:
        for document in documents:
            writer.add(document)
    return paths


@given(
    documents=st.lists(st.lists(st.integers(0, 60000), min_size=1, max_size=40), min_size=1, max_size=20),
    wide=st.booleans(),
)
@settings(max_examples=30)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], wide: bool) -> None:
    paths = write(tmp_path_factory.mktemp("corpus"), documents, np.int32 if wide else np.uint16)
    reader = IndexedReader(*paths)
    assert [reader.read(i).tolist() for i in range(len(reader))] == documents
    assert reader.read(0, 1).tolist() == documents[0][1:]
    assert reader.num_tokens == sum(map(len, documents))
    reader.close()


def test_megatron_reads_ours_and_we_read_megatrons(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    documents = [[5, 6, 7], [8], list(range(100, 400)), [9, 9]]
    write(tmp_path, documents)
    theirs = IndexedDataset(str(tmp_path / "tokens"), mmap=True)
    assert [theirs[i].tolist() for i in range(len(theirs))] == documents
    assert theirs.document_indices.tolist() == [0, 1, 2, 3, 4]

    # Their builder may split one document into several sequences, and add a mode to each.
    for multimodal in (False, True):
        prefix = tmp_path / f"theirs{multimodal}"
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32, multimodal=multimodal)
        builder.add_item(torch.tensor([1, 2, 3]))
        builder.add_item(torch.tensor([4]))
        builder.end_document()
        builder.add_item(torch.tensor([163839, 6]))
        builder.end_document()
        builder.finalize(f"{prefix}.idx")
        reader = IndexedReader(Path(f"{prefix}.bin"), Path(f"{prefix}.idx"))
        assert [reader.read(i).tolist() for i in range(len(reader))] == [[1, 2, 3, 4], [163839, 6]]


def test_dtype_follows_the_vocabulary() -> None:
    assert token_dtype(4096) is np.uint16
    assert token_dtype(163840) is np.int32


def test_truncated_bin_names_file_and_both_sizes(tmp_path: Path) -> None:
    bin_path, idx_path = write(tmp_path, [[1, 2, 3, 4], [5, 6]])
    bin_path.write_bytes(bin_path.read_bytes()[:-2])
    with pytest.raises(CorpusError, match=r"tokens\.bin has 10 bytes where .* says 12"):
        IndexedReader(bin_path, idx_path)


@pytest.mark.parametrize("keep", [0, 5, 20, 34, 60, -1])
def test_truncated_index_is_refused(tmp_path: Path, keep: int) -> None:
    bin_path, idx_path = write(tmp_path, [[1, 2, 3, 4], [5, 6]])
    idx_path.write_bytes(idx_path.read_bytes()[:keep])
    with pytest.raises(CorpusError, match=r"tokens\.idx"):
        IndexedReader(bin_path, idx_path)


def test_any_flipped_bit_of_the_index_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    bin_path, idx_path = write(tmp_path, [[1, 2, 3, 4], [5, 6], [7]])
    good = idx_path.read_bytes()
    expected = [[1, 2, 3, 4], [5, 6], [7]]
    accepted = []
    for byte in range(len(good)):
        for bit in range(8):
            bad = bytearray(good)
            bad[byte] ^= 1 << bit
            idx_path.write_bytes(bad)
            try:
                reader = IndexedReader(bin_path, idx_path)
            except CorpusError:
                continue
            if [reader.read(i).tolist() for i in range(len(reader))] != expected:
                accepted.append((byte, bit))
            reader.close()
    # Document borders (the last 4 * 8 bytes) may still be in order after a flip; the manifest's hash tells.
    inner_borders = range(len(good) - 24, len(good) - 8)
    assert all(byte in inner_borders or byte == 17 for byte, _ in accepted), accepted


def test_file_cut_short_while_open_is_an_error_not_a_crash(tmp_path: Path) -> None:
    bin_path, idx_path = write(tmp_path, [[1, 2, 3, 4], [5, 6]])
    reader = IndexedReader(bin_path, idx_path)
    with open(bin_path, "r+b") as file:
        file.truncate(6)
    with pytest.raises(CorpusError, match=r"cut short after the run opened it"):
        reader.read(0)


def test_missing_file_is_named(tmp_path: Path) -> None:
    bin_path, idx_path = write(tmp_path, [[1]])
    idx_path.unlink()
    with pytest.raises(CorpusError, match=r"tokens\.idx does not exist"):
        IndexedReader(bin_path, idx_path)


@pytest.mark.parametrize("document", [[], [-1], [65536]])
def test_writer_refuses_what_it_cannot_hold_and_leaves_nothing(tmp_path: Path, document: list[int]) -> None:
    with pytest.raises(CorpusError):
        write(tmp_path, [[1, 2], document])
    assert list(tmp_path.iterdir()) == []
