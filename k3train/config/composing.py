"""Why Hydra and OmegaConf could not compose or resolve: which file, which key, what was written there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

from k3train.config.build import Builder
from k3train.config.files import read_mapping
from k3train.config.keys import suggest_key
from k3train.config.problems import ConfigProblem, shown

_UNKNOWN = re.compile(r"Interpolation key '([^']*)' not found")
_REFERENCE = re.compile(r"\$\{\s*([\w.\[\]-]+)\s*\}")


def why_not_composed(error: Exception, directory: Path, files: list[Path]) -> list[ConfigProblem]:
    """What is wrong with the ``files`` that were being composed: values of another shape than the schema's,
    or else what the error says, with its file and key."""
    wrong = [problem for file in files for problem in _wrong_shapes(file, directory)]
    if wrong:
        return wrong
    said = " ".join(f"{error}".split()) or type(error).__name__
    named = [file for file in files if _name(file, directory) in said]
    what = max(named, key=lambda file: len(str(file)), default="the files")
    rule = f"{what} cannot be composed: {shown(said, 300).rstrip('.')}"
    return [ConfigProblem(_key_of(error), None, rule, "Correct what it names", "config.compose")]


def why_not_resolved(error: Exception, tree: object) -> ConfigProblem:
    """What is wrong with a value that refers to another; ``tree`` holds it as written, with ``${...}``."""
    key = _key_of(error) or next(_circular(tree), "")
    unknown = _UNKNOWN.search(str(error))
    fix = "Write the value itself"
    if unknown:
        meant = suggest_key(unknown[1])
        reason = f"there is no setting {unknown[1]}"
        fix = f"Did you mean ${{{meant}}}?" if meant else fix
    elif isinstance(error, RecursionError) or "Recursive interpolation" in str(error):
        reason = "it refers back to itself"
    else:
        reason = shown(" ".join(str(error).split("\n")[0].split()), 300)
    return ConfigProblem(
        key, _value_at(tree, key), f"cannot be resolved: {reason}", fix, "config.interpolation"
    )


def _wrong_shapes(file: Path, directory: Path) -> Iterator[ConfigProblem]:
    """Values that no merge takes, such as a list in the place of settings."""
    tree: dict[str, object] = {**read_mapping(file)[0]}
    tree.pop("defaults", None)
    group = file.parent.relative_to(directory).as_posix()
    builder = Builder()
    builder.build(tree if group in (".", "experiment") else {group: tree})
    for problem in builder.problems:
        if problem.id == "config.type" and isinstance(problem.value, (list, Mapping)):
            yield replace(problem, rule=f"(set in {file.relative_to(directory)}) {problem.rule}")


def _name(file: Path, directory: Path) -> str:
    return file.relative_to(directory).with_suffix("").as_posix()


def _key_of(error: BaseException | None) -> str:
    """Key path that the error or one that led to it is about; empty when none says."""
    while error is not None:
        key = getattr(error, "full_key", None)
        if key:
            return re.sub(r"\[(\w+)\]", r".\1", str(key))
        error = error.__cause__ or error.__context__
    return ""


def _circular(tree: object, path: str = "") -> Iterator[str]:
    """Keys whose value refers to what they are a part of."""
    entries = cast("Mapping[str, object]", tree).items() if isinstance(tree, Mapping) else ()
    for name, value in entries:
        key = f"{path}.{name}" if path else name
        yield from _circular(value, key)
        for target in _REFERENCE.findall(value) if isinstance(value, str) else ():
            if f"{key}.".startswith(f"{target}."):
                yield key


def _value_at(tree: object, key: str) -> object:
    for name in key.split("."):
        if isinstance(tree, Mapping):
            tree = cast("Mapping[str, object]", tree).get(name)
        elif isinstance(tree, list) and name.isdecimal() and int(name) < len(cast("list[object]", tree)):
            tree = cast("list[object]", tree)[int(name)]
        else:
            return None
    return tree
