"""Defaults lists, read as Hydra reads them: which files a run is composed from, and what no list can hold.

Hydra's own errors name no file, some no entry, and a list that selects itself ends in a RecursionError.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from k3train.config.files import read_mapping
from k3train.config.keys import closest_word
from k3train.config.overrides import GROUPS, options_of
from k3train.config.problems import ConfigProblem, shown

_PATH = r"\w[\w.-]*(?:/\w[\w.-]*)*"
_KEY = re.compile(
    rf"(?P<words>(?:(?:override|optional)\s+)*)(?P<slash>/?)(?P<group>{_PATH})(?P<package>@\S*)?"
)
_FILE = re.compile(rf"(?P<slash>/?)(?P<path>{_PATH})(?:@\S*)?")
_NO_FILES = ("_self_", "run_schema")
"""Entries for the file itself and, where composition starts, for the schema's defaults."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a defaults list."""

    text: str
    """As it is written, without its dash."""
    group: str
    """Folder of the files it selects, from the configuration folder."""
    options: tuple[str, ...]
    by_path: bool = False
    """Whether it names a file by its path, which no choice of the group changes."""
    override: bool = False
    optional: bool = False
    plain: bool = False
    """Whether the group is written from the configuration folder, with a slash, and without '@'."""


@dataclass(slots=True)
class Composition:
    """The files of a run, found from the one where composition starts."""

    directory: Path
    chosen: dict[str, tuple[str, ...]]
    """Options of the groups that the command line or an ``override`` decides; the first to choose decides."""
    files: list[Path] = field(default_factory=list[Path])
    problems: list[ConfigProblem] = field(default_factory=list[ConfigProblem])

    def add(self, file: Path, above: tuple[Path, ...] = ()) -> None:
        """Take in a file and all that its list selects; ``above`` are those whose lists led to it."""
        if file in above:
            what = "itself" if file == above[-1] else file.relative_to(self.directory)
            rule = f"selects {what} in its defaults list, which goes round in a circle"
            self._refuse(above[-1], rule, "Take the entry out")
            return
        if file in self.files:
            return
        self.files.append(file)
        tree, problems = read_mapping(file)
        self.problems += problems
        entries = [entry for entry in self._entries(file, tree) if not above or self._may_stand(file, entry)]
        self._override(file, [entry for entry in entries if entry.override])
        for entry in reversed(entries):  # as Hydra: overrides of a later file reach the earlier ones
            for option in self._selected(entry):
                selected = self._file(entry.group, option)
                if selected.is_file():
                    self.add(selected, (*above, file))
                elif not entry.optional:
                    self._missing(file, entry.group, option)

    def _entries(self, file: Path, tree: Mapping[str, object]) -> Iterator[Entry]:
        entries = tree.get("defaults", [])
        if not isinstance(entries, list):
            rule = f"has 'defaults: {shown(entries)}', where a list of files belongs"
            self._refuse(file, rule, "Write one line '- override /GROUP: NAME' for each below it, or none")
            return
        for entry in cast("list[object]", entries):
            read = _read(entry, file.parent.relative_to(self.directory).as_posix().removeprefix("."))
            if read is not None:
                yield read
            elif entry not in _NO_FILES:
                rule = f"has the entry {shown(entry)} in its defaults list"
                self._refuse(file, rule, "Write the name of a file, or 'override /GROUP: NAME'")

    def _override(self, file: Path, entries: list[Entry]) -> None:
        texts: dict[str, str] = {}
        for entry in entries:
            if entry.group in texts:
                rule = f"has '{texts[entry.group]}' and '{entry.text}' in its defaults list, and one can hold"
                self._refuse(file, rule, "Leave one out", key=entry.group)
            texts[entry.group] = entry.text
            missing = [name for name in entry.options if not self._file(entry.group, name).is_file()]
            for option in missing:
                self._missing(file, entry.group, option)
            if not missing:
                self.chosen.setdefault(entry.group, entry.options)

    def _may_stand(self, file: Path, entry: Entry) -> bool:
        """Whether an entry can stand in a file other than the one where composition starts."""
        word, named = entry.group.rpartition("/")[2], ", ".join(entry.options)
        there = (self.directory / entry.group).is_dir()
        if entry.by_path or (entry.override and entry.plain and entry.group in GROUPS[:-1]):
            return True
        if there and entry.group not in GROUPS:
            return True
        if word == GROUPS[-1]:
            rule = f"has '{entry.text}' in its defaults list, where an experiment is selected already"
            fix = f"To begin from it write '- {named}'" if named else "Take the entry out"
        elif word in GROUPS:
            rule = f"has '{entry.text}' in its defaults list, where a file of {word} is selected already"
            fix = f"Write '- override /{word}: {named}'"
        else:
            meant = closest_word(word, GROUPS)
            folder = self.directory / entry.group
            rule = f"has '{entry.text}' in its defaults list, and there is no folder {folder}"
            fix = f"Did you mean {meant}?" if meant else f"There are: {', '.join(GROUPS[:-1])}"
        self._refuse(file, rule, fix)
        return False

    def _selected(self, entry: Entry) -> tuple[str, ...]:
        if entry.override:
            return ()
        return entry.options if entry.by_path else self.chosen.get(entry.group, entry.options)

    def _file(self, group: str, option: str) -> Path:
        return self.directory / group / f"{option}.yaml"

    def _missing(self, file: Path, group: str, option: str) -> None:
        options = options_of(group, self.directory)
        meant = closest_word(option, options)
        fix = f"Did you mean {meant}?" if meant else f"There are: {', '.join(options) or 'none'}"
        rule = f"(selected in {file}) is no file of {self.directory / group}"
        self.problems.append(ConfigProblem(group or "defaults", option, rule, fix, "config.group"))

    def _refuse(self, file: Path, rule: str, fix: str, key: str = "") -> None:
        self.problems.append(ConfigProblem("", key or None, f"{file} {rule}", fix, "config.defaults"))


def composition(directory: Path, root: str, overrides: list[str]) -> Composition:
    """The files that ``directory``/``root``.yaml and ``overrides`` such as ``model=k3`` select, and every
    problem of their defaults lists and of reading them."""
    chosen = [text.partition("=") for text in overrides if not text.startswith("++")]
    found = Composition(directory, {group: (option,) for group, _, option in chosen})
    found.add(directory / f"{root}.yaml")
    return found


def _read(entry: object, folder: str) -> Entry | None:
    """An entry in a file of ``folder``; None when it selects no file or is none."""
    if isinstance(entry, str) and entry not in _NO_FILES[: 1 if folder else 2]:
        if (file := _FILE.fullmatch(entry)) is None:
            return None
        group, _, option = (file["path"] if file["slash"] else f"{folder}/{file['path']}").rpartition("/")
        return Entry(entry, group, (option,), by_path=True)
    if not isinstance(entry, Mapping) or len(cast("Mapping[object, object]", entry)) != 1:
        return None
    key, value = next(iter(cast("Mapping[object, object]", entry).items()))
    found = _KEY.fullmatch(key) if isinstance(key, str) else None
    options = _options(value)
    if found is None or options is None:
        return None
    return Entry(
        text=f"{key}: {shown(value)}",
        group=found["group"] if found["slash"] or not folder else f"{folder}/{found['group']}",
        options=options,
        override="override" in found["words"],
        optional="optional" in found["words"],
        plain=bool(found["slash"]) and not found["package"],
    )


def _options(value: object) -> tuple[str, ...] | None:
    options = [] if value is None else cast("list[object]", value) if isinstance(value, list) else [value]
    if not all(isinstance(option, str) for option in options):
        return None
    return tuple(cast("list[str]", options))
