"""What the documents say that can be checked: command blocks, paths, links and the file tree."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOP_FOLDERS = "configs|data|docker|docs|k3train|launch|tests|\\.ci"
_FENCE = re.compile(r"^```(\w*)\s*$")
_NOT_RUN = re.compile(r"<!-- not run: (\S.*) -->")
_PATH = re.compile(rf"(?:\./)?((?:{TOP_FOLDERS})/[\w./-]*|LICENSE|[A-Z]+\.md|[\w.-]+\.(?:toml|txt|md|yaml))")
_CREATED = re.compile(r"run\.yaml")
"""Files that a run makes."""


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of a document."""

    file: Path
    line: int
    """Line of the opening fence, from 1."""
    language: str
    text: str
    not_run: str | None
    """Why the tests do not run it, from the comment in front of it."""

    @property
    def name(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}"


def documents() -> list[Path]:
    """Every document of the checkout that a person reads."""
    found = [*ROOT.glob("*.md")]
    for folder in ("configs", "data", "docker", "docs", "launch"):
        found += (ROOT / folder).rglob("*.md")
    return sorted(found)


def blocks(file: Path) -> Iterator[Block]:
    """The fenced blocks of a document. Raises ValueError when one is not closed."""
    lines = file.read_text(encoding="utf-8").splitlines()
    start, language = None, ""
    for index, line in enumerate(lines):
        fence = _FENCE.match(line)
        if fence is None:
            continue
        if start is None:
            start, language = index, fence[1]
            continue
        before = next((text for text in reversed(lines[:start]) if text.strip()), "")
        reason = _NOT_RUN.fullmatch(before.strip())
        text = "\n".join(lines[start + 1 : index])
        yield Block(file, start + 1, language, text, reason[1] if reason else None)
        start = None
    if start is not None:
        raise ValueError(f"{file}:{start + 1} opens a block that nothing closes")


def prose(file: Path) -> str:
    """The document without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", file.read_text(encoding="utf-8"), flags=re.M | re.S)


def named_paths(file: Path) -> set[str]:
    """Paths of the checkout that the document's inline code names; what a run creates is left out."""
    spans = re.findall(r"`([^`\n]+)`", prose(file))
    first_words = {span.split()[0].rstrip(":,") for span in spans if span.strip()}
    return {
        found[1]
        for word in first_words
        if (found := _PATH.fullmatch(word)) and not _CREATED.fullmatch(found[1].rpartition("/")[2])
    }


def links(file: Path) -> set[str]:
    """Targets of the document's links inside the checkout, without their #anchors."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(file))
    return {target.partition("#")[0] for target in targets if "://" not in target} - {""}


def tree_paths(block: Block) -> list[str]:
    """Paths of a file tree, in which two spaces of indentation are one level."""
    paths: list[str] = []
    parents: list[str] = []
    for line in block.text.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        parents[depth:] = [line.split()[0]]
        paths.append("".join(parents))
    return paths


def commands(block: Block) -> list[list[str]]:
    """The block's simple commands as words; comments dropped, continued lines joined."""
    text = block.text.replace("\\\n", " ")
    return [words for line in text.splitlines() if (words := shlex.split(line, comments=True))]
