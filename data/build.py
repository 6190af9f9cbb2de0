#!/usr/bin/env python3
"""Build the tiny corpus: ``python data/build.py tiny``. See data/README.md."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bpe import SPECIAL, encode, train
from download import NoNetwork, WrongHash, download, packages
from rich.console import Console
from rich.table import Table
from text_code import code
from text_docs import docs
from text_offline import offline_docs, offline_prose
from text_prose import prose
from texts import LONG_TOKENS, Text, distinct, heldout_ranks

from k3train.config.json_file import read_json
from k3train.data.corpus import Manifest, file_sha256, read_manifest, verify, write_corpus
from k3train.data.indexed import CorpusError, write_atomically

RECIPE = 1
"""Raised when the same packages give other tokens."""
VOCAB_SIZE = 2048
BPE_SAMPLE_BYTES = 4_000_000
CORPORA = ("prose", "docs", "code", "heldout")
WITH_LONG = ("prose", "code")
"""Sources that give a long document to the held-out corpus."""
NOTHING_BUILT = "no corpus was built or replaced; the same command starts over"

Say = Callable[[str], None]


def main(arguments: list[str] | None = None) -> int:
    """Command line; 0 when the corpus is there and whole, 1 with one sentence on stderr when it is not."""
    parser = argparse.ArgumentParser(prog="python data/build.py", description="Build a training corpus.")
    parser.add_argument("name", choices=["tiny"], help="which corpus")
    parser.add_argument(
        "--out", type=Path, default=Path("corpus"), help="folder it is put into (default: corpus)"
    )
    parser.add_argument("--offline", action="store_true", help="use only text that is installed already")
    parser.add_argument("--force", action="store_true", help="build again even if a whole corpus is there")
    options = parser.parse_args(arguments)
    console = Console(highlight=False, soft_wrap=True)
    started = time.monotonic()

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - started:5.1f} s[/dim]  {text}")

    folder = options.out / options.name
    before = made(folder)
    try:
        if not options.force and already_there(folder, options.offline, say):
            return 0
        build(folder, options.out / "downloads", options.offline, say)
        console.print(table(folder))
    except OSError as error:
        where = error.filename or options.out
        print(
            f"cannot write the corpus: {error.strerror} ({where}); --out takes another folder",
            file=sys.stderr,
        )
        return 1
    except (CorpusError, WrongHash) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        there = f"{folder} is built and whole" if made(folder) != before else NOTHING_BUILT
        print(f"interrupted: {there}", file=sys.stderr)
        return 1
    return 0


def made(folder: Path) -> int | None:
    """Which build lies in the folder: each has another number; None for none."""
    try:
        return (folder / "build.json").stat().st_ino
    except OSError:
        return None


def already_there(folder: Path, offline: bool, say: Say) -> bool:
    """Whether a whole corpus lies in the folder. A damaged one counts as none."""
    path = folder / "build.json"
    if not path.is_file():
        return False
    try:
        known = read_json(path, CorpusError, "it tells how the corpus was built.")
        if not isinstance(known, dict) or not known.keys() >= {"recipe", "offline"}:
            raise CorpusError(f"{path} does not tell how the corpus was built.")
        for name in CORPORA:
            manifest = verify(folder / name)
            if manifest.tokenizer_sha256 != file_sha256(folder / "tokenizer.json"):
                raise CorpusError(f"{folder / name} was made with another tokenizer than lies beside it.")
    except (CorpusError, OSError) as error:
        say(f"{error} Building it again.")
        return False
    if known["recipe"] != RECIPE:
        say(f"{folder} was made by another version of this program. Building it again.")
        return False
    if known["offline"] and not offline:
        say(f"{folder} is there and whole, made without a network; --force builds the full one.")
    else:
        say(f"{folder} is there and whole: up to date.")
    return True


def build(folder: Path, downloads: Path, offline: bool, say: Say) -> None:
    """Collect, tokenise and write everything beside its place, then move it there."""
    sources, offline = collect(downloads, offline, say)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        texts = [t for source in sources.values() for t in source]
        tokenizer = train(texts, vocab_size=VOCAB_SIZE, sample_bytes=BPE_SAMPLE_BYTES)
        path = temporary / "tokenizer.json"
        write_atomically(path, tokenizer.to_str().encode())
        say(f"trained a byte-level BPE tokenizer of {tokenizer.get_vocab_size():,} ids")
        write(temporary, sources, path, offline, say)
        about = {"recipe": RECIPE, "offline": offline, "packages": {} if offline else packages()}
        write_atomically(temporary / "build.json", json.dumps(about, indent=2).encode())
        put_in_place(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def put_in_place(temporary: Path, folder: Path) -> None:
    """Make ``temporary`` the folder. Whatever ends this, one whole corpus lies there, the old or the new."""
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    try:
        if folder.exists():
            folder.rename(old)
        temporary.rename(folder)
    finally:
        if old.exists() and not folder.exists():
            old.rename(folder)
        shutil.rmtree(old, ignore_errors=True)


def collect(downloads: Path, offline: bool, say: Say) -> tuple[dict[str, list[Text]], bool]:
    """The texts of each source, and whether they had to do without a network."""
    archives: dict[str, Path] = {}
    if not offline:
        try:
            archives = download(downloads)
            size = sum(p.stat().st_size for p in archives.values())
            say(f"have {len(archives)} packages, {size / 2**20:.1f} MiB, hashes as in data/packages.txt")
        except NoNetwork as error:
            say(f"no download ({error}): using text that is installed already, as --offline does")
            offline = True
    if offline:
        found = {"prose": offline_prose(), "docs": offline_docs(), "code": code()}
    else:
        found = {"prose": prose(archives), "docs": docs(archives), "code": code()}
    sources = {name: distinct(texts) for name, texts in found.items()}
    size = sum(len(t.text.encode()) for texts in sources.values() for t in texts)
    say(f"collected {sum(map(len, sources.values())):,} documents, {size / 1e6:.1f} MB of text")
    return sources, offline


def write(folder: Path, sources: dict[str, list[Text]], tokenizer: Path, offline: bool, say: Say) -> None:
    """Tokenise each source, split off what is held out, and write the corpora, the held-out one last."""
    command = f"python data/build.py tiny{' --offline' if offline else ''}"
    sha256 = file_sha256(tokenizer)
    away: list[tuple[Text, np.ndarray]] = []

    def put(name: str, rows: list[tuple[Text, np.ndarray]]) -> None:
        write_corpus(
            folder / name,
            (tokens for _, tokens in rows),
            tokenizer_sha256=sha256,
            vocab_size=VOCAB_SIZE,
            special={name: number for number, name in enumerate(SPECIAL)},
            licences={text.origin: text.licence for text, _ in rows},
            command=command,
            text_bytes=sum(len(text.text.encode()) for text, _ in rows),
        )

    for name, texts in sources.items():
        rows = list(zip(texts, encode(tokenizer, texts), strict=True))
        lengths = [len(tokens) for _, tokens in rows]
        held = heldout_ranks(texts, lengths, with_long=name in WITH_LONG)
        away += [row for row in rows if row[0].rank in held]
        put(name, [row for row in rows if row[0].rank not in held])
        say(f"wrote {name}: {sum(lengths):,} tokens, {len(held)} of {len(rows)} documents held out")
    put("heldout", away)
    longest = max(read_manifest(folder / name).longest_document_tokens for name in sources)
    if longest < LONG_TOKENS:
        say(f"the longest training document has {longest:,} tokens: longer contexts see only packed ones")


def table(folder: Path) -> Table:
    """What the corpus holds."""
    result = Table("source", "documents", "tokens", "longest", "bytes/token", "licences", title=str(folder))
    for column in result.columns[1:5]:
        column.justify = "right"
    for name in CORPORA:
        manifest: Manifest = read_manifest(folder / name)
        licences = sorted(set(manifest.licences.values()))
        result.add_row(
            name,
            f"{manifest.documents:,}",
            f"{manifest.tokens:,}",
            f"{manifest.longest_document_tokens:,}",
            f"{manifest.text_bytes / manifest.tokens:.2f}",
            "; ".join(licences) if len(licences) <= 3 else f"{len(licences)}, see its manifest.json",
        )
    return result


if __name__ == "__main__":
    sys.exit(main())
