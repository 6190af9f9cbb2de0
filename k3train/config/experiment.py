"""What a file whose settings are those of the whole run must begin with and cannot hold.

Without its first line Hydra puts an experiment's settings under ``experiment``, and it takes a key ``hydra``
away; it says neither.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from k3train.config.files import read_mapping
from k3train.config.problems import ConfigProblem, shown

PACKAGE = "# @package _global_"
"""The line an experiment begins with: its settings are those of the run."""

_PACKAGE = re.compile(r"#\s*@package\s+_global_\s*")
_BYTE_ORDER_MARK = "\ufeff"


def experiment_problems(file: Path) -> Iterator[ConfigProblem]:
    """What is wrong with a readable file of the run, be it an experiment or not."""
    experiment = file.parent.name == "experiment"
    text = file.read_text(encoding="utf-8")
    is_global = _begins_with_package(text.removeprefix(_BYTE_ORDER_MARK))
    if experiment and not is_global:
        rule = f"{file} does not begin with '{PACKAGE}', so its settings would not be those of the run"
        yield _problem(file.stem, rule, f"Make '{PACKAGE}' its first line")
    elif is_global and text.startswith(_BYTE_ORDER_MARK):
        rule = (
            f"{file} begins with a byte order mark, which editors do not show and which hides its first line"
        )
        yield _problem(file.stem, rule, "Save it as UTF-8 without a byte order mark")
    tree = read_mapping(file)[0]
    if "hydra" in tree and (is_global or not experiment):
        rule = f"{file} has 'hydra: {shown(tree['hydra'])}', which only composes the settings here"
        yield _problem(file.stem, rule, "Leave it out")


def _begins_with_package(text: str) -> bool:
    """Hydra stops looking at the first line that is neither empty nor this, were it a comment."""
    lines = (line.strip() for line in text.splitlines())
    return _PACKAGE.fullmatch(next(filter(None, lines), "")) is not None


def _problem(name: str, rule: str, fix: str) -> ConfigProblem:
    return ConfigProblem("", name, rule, fix, "config.experiment")
