"""Settings printed for people: the whole tree with changes marked, or only the changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from k3train.config.build import to_plain
from k3train.config.compare import Difference, differences
from k3train.config.problems import BadInput, shown
from k3train.config.schema import Run

MARK = "*"
"""Stands before a setting that is not the default."""


def take_word(word: str, given: list[str]) -> bool:
    """Take the one ``word`` that may stand beside settings out of ``given``; whether it was there.

    Raises BadInput at any other word.
    """
    found = word in given
    given[:] = [text for text in given if text != word]
    for text in given:
        if text.isidentifier():
            raise BadInput(
                f"show {text}: no such part; there is show {word}, and show alone prints the settings"
            )
    return found


def print_tree(run: Run, base: Run, console: Console) -> None:
    """Every setting of ``run``; those that differ from ``base`` are marked and show the other value."""
    changed = {difference.key: difference for difference in differences(base, run)}
    tree = Tree(Text(run.name, style="bold"), guide_style="dim")
    _grow(tree, to_plain(run), "", changed)
    console.print(tree, soft_wrap=True)
    if changed:
        console.print(Text(f"{MARK} differs from the default", style="dim"))


def print_differences(run: Run, base: Run, base_name: str, console: Console) -> None:
    """Only the settings that differ from ``base``: key, its value there, its value here."""
    lines = _difference_lines(run, base) or [f"no difference to {base_name}"]
    console.print("\n".join(lines), soft_wrap=True, markup=False, highlight=False)


def _difference_lines(run: Run, base: Run) -> list[str]:
    """A line for each difference; a stage or source that only ``base`` has is one."""
    gone = [
        f"curriculum.stages.{name}" for name in base.curriculum.stages.keys() - run.curriculum.stages.keys()
    ]
    gone += [f"data.sources.{name}" for name in base.data.sources.keys() - run.data.sources.keys()]
    lines: list[str] = []
    for difference in differences(base, run):
        entry = ".".join(difference.key.split(".")[:3])
        lines.append(f"{entry}: is not there" if entry in gone else str(difference))
    return list(dict.fromkeys(lines))


def _grow(tree: Tree, node: Mapping[str, Any], path: str, changed: dict[str, Difference]) -> None:
    for name, value in node.items():
        key = f"{path}.{name}" if path else name
        if value is None and path.startswith("curriculum.stages."):
            continue  # a stage mostly keeps the run's settings; only what it sets itself is of interest
        if isinstance(value, Mapping) and value:
            _grow(tree.add(Text(name, style="bold")), cast("Mapping[str, Any]", value), key, changed)
        else:
            tree.add(_line(name, {} if isinstance(value, Mapping) else value, changed.get(key)))


def _line(name: str, value: object, difference: Difference | None) -> Text:
    if difference is None:
        return Text.assemble(f"{name}: ", (shown(value), "cyan"))
    was = "" if difference.old is None else f"  (default {shown(difference.old)})"
    return Text.assemble((f"{MARK} {name}: ", "yellow"), (shown(value), "bold yellow"), (was, "dim"))
