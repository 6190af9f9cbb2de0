"""A sealed corpus: every kind of damage is found, at opening, at first reading or by verify."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from k3train.data.corpus import Corpus, read_manifest, verify
from k3train.data.indexed import CorpusError
from tests.unit.data.corpora import VOCAB, make_corpus

LENGTHS = [40, 1, 300, 7]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_corpus(tmp_path / "corpus", LENGTHS)
    return tmp_path / "corpus"


def open_corpus(folder: Path) -> Corpus:
    return Corpus(folder, vocab_size=VOCAB)


def test_manifest_describes_the_corpus(folder: Path) -> None:
    manifest = verify(folder)
    assert (manifest.documents, manifest.tokens, manifest.longest_document_tokens) == (4, 348, 300)
    assert set(manifest.files) == {"tokens.bin", "tokens.idx", "documents.crc32"}
    assert {p.name for p in folder.iterdir()} == {*manifest.files, "manifest.json"}
    corpus = open_corpus(folder)
    assert corpus.lengths.tolist() == LENGTHS
    part = corpus.read(2, 10, 20)
    assert part.dtype == np.int32
    np.testing.assert_array_equal(part, corpus.read(2, 0, 300)[10:30])


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.idx", "documents.crc32"])
@pytest.mark.parametrize("change", [-1, 1])
def test_wrong_sizes_are_refused_with_both_sizes(folder: Path, name: str, change: int) -> None:
    path = folder / name
    content = path.read_bytes()
    path.write_bytes(content[:-1] if change < 0 else content + b"\0")
    message = rf"{name} has {len(content) + change:,} bytes where its manifest says {len(content):,}"
    with pytest.raises(CorpusError, match=message):
        open_corpus(folder)
    with pytest.raises(CorpusError, match=message):
        verify(folder)


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.idx", "documents.crc32", "manifest.json"])
def test_missing_files_are_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(CorpusError, match=name):
        open_corpus(folder)


def test_every_flipped_bit_is_found_by_reading_or_verify(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("tokens.bin", "tokens.idx", "documents.crc32"):
        path = folder / name
        content = path.read_bytes()
        for bit in rng.integers(0, 8 * len(content), 40).tolist():
            bad = bytearray(content)
            bad[bit // 8] ^= 1 << bit % 8
            path.write_bytes(bad)
            with pytest.raises(CorpusError, match=r"sha256 of its manifest"):
                verify(folder)
            with pytest.raises(CorpusError):  # noqa: PT012  opening or reading may find it
                corpus = open_corpus(folder)
                for document, length in enumerate(LENGTHS):
                    # A damaged document is found by any part that is read, not only by the damaged part.
                    corpus.read(document, 0, min(length, 5))
                assert np.array_equal(corpus.lengths, LENGTHS)
        path.write_bytes(content)
    verify(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "other"}', '{"format": "k3train corpus 1"}'])
def test_damaged_manifests_are_refused(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_text(text)
    with pytest.raises(CorpusError, match=r"manifest\.json"):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "is not of format"), ("{}", "is not of format"), ("NaN", "is not of format"),
        ("[" * 200_000, "cannot be read as JSON"),
    ],
)  # fmt: skip
def test_a_manifest_of_another_shape_is_refused_in_words(folder: Path, text: str, said: str) -> None:
    (folder / "manifest.json").write_text(text)
    with pytest.raises(CorpusError, match=said) as error:
        read_manifest(folder)
    assert "object" not in str(error.value)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"vocab_size": None}, "vocab_size is not a whole number"),
        ({"vocab_size": -1}, "vocab_size is not a whole number"),
        ({"special": None}, "special is not a mapping"),
        ({"special": {"pad": -7}}, "special has no bos"),
        ({"special": {"pad": 99999, "bos": 1, "eod": 2}}, "special.pad is none of its vocabulary's ids"),
        ({"special": {"pad": 0, "bos": 1, "eod": -5}}, "special.eod is none of its vocabulary's ids"),
        ({"files": None}, "files is not a mapping"),
        ({"files": {"tokens.bin": {"bytes": 1}}}, "files.tokens.bin does not tell"),
        ({"colour": 1}, "it has colour, which is no entry"),
    ],
)
def test_wrong_entries_of_a_manifest_are_named(folder: Path, entries: dict, said: str) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))
    with pytest.raises(CorpusError, match=f"manifest.json is damaged: {said}"):
        read_manifest(folder)


def test_swapped_index_of_another_corpus_is_refused(folder: Path, tmp_path: Path) -> None:
    make_corpus(tmp_path / "other", [300, 1, 40, 7], seed=1)
    (folder / "tokens.idx").write_bytes((tmp_path / "other" / "tokens.idx").read_bytes())
    with pytest.raises(CorpusError, match="checksum"):
        open_corpus(folder).read(0, 0, 5)


def test_a_token_outside_the_vocabulary_names_document_and_place(folder: Path) -> None:
    values = json.loads((folder / "manifest.json").read_text())
    values["vocab_size"] = 100
    (folder / "manifest.json").write_text(json.dumps(values))
    corpus = Corpus(folder, vocab_size=100)
    with pytest.raises(CorpusError, match=r"document 2 of .*tokens\.bin has token \d+ at place \d+, outside"):
        corpus.read(2, 0, 300)


def test_a_failed_build_leaves_no_manifest(folder: Path) -> None:
    """Whoever is interrupted while rebuilding must not leave the old manifest beside half-new files."""
    with pytest.raises(CorpusError):
        make_corpus(folder, [5, 0])
    with pytest.raises(CorpusError, match="unfinished"):
        open_corpus(folder)
    assert not list(folder.glob(".*"))


def test_fingerprint_follows_the_content(folder: Path, tmp_path: Path) -> None:
    before = open_corpus(folder).fingerprint
    make_corpus(tmp_path / "same", LENGTHS)
    make_corpus(tmp_path / "other", LENGTHS, seed=1)
    assert open_corpus(tmp_path / "same").fingerprint == before
    assert open_corpus(tmp_path / "other").fingerprint != before
