"""An experiment's file before Hydra reads it: its first line and what it selects.

Without the first line Hydra puts the settings under ``experiment``, and without ``override`` it looks for a
folder below it; neither error names the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

from k3train.config.files import read_mapping
from k3train.config.keys import closest_word
from k3train.config.overrides import GROUPS, options_of
from k3train.config.problems import ConfigProblem

PACKAGE = "# @package _global_"
"""The line an experiment begins with: its settings are those of the run."""

_PACKAGE = re.compile(r"#\s*@package\s+_global_\s*")
_SELECTION = re.compile(r"(?:override\s+)?/?(\w+)")


def experiment_problems(directory: Path, root: str, overrides: list[str]) -> list[ConfigProblem]:
    """What is wrong with the selected experiment's file; ``root`` is the file where composition starts."""
    name = _selected(directory / f"{root}.yaml", overrides)
    file = directory / "experiment" / f"{name}.yaml"
    if name is None or not file.is_file():
        return []
    problems: list[ConfigProblem] = []
    if not _begins_with_package(file):
        rule = f"{file} does not begin with '{PACKAGE}', so its settings would not be those of the run"
        problems.append(_problem(name, rule, f"Make '{PACKAGE}' its first line"))
    for key, option in _selections(file):
        problems += _selection_problems(file, name, key, option, directory)
    return problems


def _selected(root: Path, overrides: list[str]) -> str | None:
    for override in reversed(overrides):
        if override.startswith("experiment="):
            return override.partition("=")[2]
    return next((option for key, option in _selections(root) if key == "experiment"), None)


def _selections(file: Path) -> Iterator[tuple[str, str]]:
    """Key and option of each entry of the defaults list that selects a file of a group."""
    entries = read_mapping(file)[0].get("defaults")
    for entry in cast("list[object]", entries) if isinstance(entries, list) else []:
        if isinstance(entry, Mapping):
            for key, option in cast("Mapping[object, object]", entry).items():
                if isinstance(option, str):
                    yield str(key), option


def _begins_with_package(file: Path) -> bool:
    """Hydra stops looking at the first line that is neither empty nor this, were it a comment."""
    lines = (line.strip() for line in file.read_text(encoding="utf-8").splitlines())
    return _PACKAGE.fullmatch(next(filter(None, lines), "")) is not None


def _selection_problems(
    file: Path, name: str, key: str, option: str, directory: Path
) -> Iterator[ConfigProblem]:
    found = _SELECTION.fullmatch(key)
    group = found[1] if found else ""
    if group not in GROUPS or group == "experiment":
        return
    if " ".join(key.split()) != f"override /{group}":
        rule = (
            f"{file} has '{key}: {option}' in its defaults list, where a file of {group} is selected already"
        )
        yield _problem(name, rule, f"Write '- override /{group}: {option}'")
    options = options_of(group, directory)
    if option not in options:
        meant = closest_word(option, options)
        fix = f"Did you mean {meant}?" if meant else f"There are: {', '.join(options) or 'none'}"
        rule = f"(selected in {file}) is no file of {directory / group}"
        yield ConfigProblem(group, option, rule, fix, "config.group")


def _problem(name: str, rule: str, fix: str) -> ConfigProblem:
    return ConfigProblem("", name, rule, fix, "config.experiment")
