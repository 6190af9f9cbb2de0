"""Command-line overrides: which forms are allowed and what they become for Hydra."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException

from k3train.config.files import runs_something
from k3train.config.keys import closest_word, flattened, follow, holds_keys, suggest_key, without_none
from k3train.config.nearest import choices
from k3train.config.problems import ConfigProblem, shown

GROUPS = (
    "model",
    "parallel",
    "optim",
    "data",
    "curriculum",
    "checkpoint",
    "monitor",
    "cluster",
    "experiment",
)
"""Folders below configs/ whose files can be selected by name."""


_LONG_NUMBER = re.compile(r"\d{4000}")
"""Python reads no whole number of more than 4,300 digits."""
_SIGNS = {OverrideType.ADD: "+", OverrideType.FORCE_ADD: "++"}


@dataclass(slots=True)
class Overrides:
    """The user's overrides, sorted."""

    accepted: list[str] = field(default_factory=list[str])
    """In the spelling that Hydra wants."""
    problems: list[ConfigProblem] = field(default_factory=list[ConfigProblem])
    wrong_keys: set[str] = field(default_factory=set[str])
    """Keys that will not have the value the user meant."""


def read_overrides(given: list[str], config_dir: Path) -> Overrides:
    """Check every override; accepted ones are ready for Hydra, the others are problems."""
    result = Overrides()
    parser = OverridesParser.create()
    first: dict[str, str] = {}
    for text in given:
        override = _parse(parser, text)
        if override is None:
            rule = f"'{shown(text)}' cannot be read as key=value"
            _refuse(result, "", text, rule, _unreadable_fix(text), "config.override")
        elif (before := first.setdefault(key := override.key_or_group, text)) != text:
            rule = f"'{shown(before)}' and '{shown(text)}' set the same key, and only one can hold"
            _refuse(result, key, None, rule, "Leave one out", "config.override", text_only=True)
        else:
            _sort_in(result, override, text, config_dir)
    return result


def options_of(group: str, config_dir: Path) -> list[str]:
    """Names that can be selected in a group."""
    return sorted(path.stem for path in (config_dir / group).glob("*.yaml"))


def _parse(parser: OverridesParser, text: str) -> Override | None:
    try:
        override = parser.parse_override(text)
    except (HydraException, RecursionError, ValueError):
        return None
    return override if override.key_or_group else None


def _sort_in(result: Overrides, override: Override, text: str, config_dir: Path) -> None:
    key = override.key_or_group
    plain = f"{key}={text.partition('=')[2]}"
    if override.type in _SIGNS and (override.type, key) != (OverrideType.ADD, "experiment"):
        sign = _SIGNS[override.type]
        rule = f"'{text}' begins with '{sign}', which could create a setting that nothing reads"
        known = key in GROUPS or follow(key) is not None
        fix = f"Write {plain}" if known else _known_key(key)[1]
        _refuse(result, key, None, rule, fix, "config.override", text_only=True)
    elif override.is_delete():
        rule = f"'{text}' takes a setting away, which is not supported"
        _refuse(result, key, None, rule, "Set its value", "config.override", text_only=True)
    elif override.package is not None or re.split(r"[./]", key)[0] == "hydra":
        rule = f"'{text}' addresses Hydra itself, which only composes the settings here"
        _refuse(result, key, None, rule, "Leave it out", "config.override", text_only=True)
    elif override.is_sweep_override():
        rule = f"'{text}' gives several values, and one run takes one"
        fix = f"For a list write {key}=[a,b]; put quotes around text that has a comma"
        _refuse(result, key, None, rule, fix, "config.override", text_only=True)
    elif key in GROUPS:
        _select(result, key, cast(object, override.value()), config_dir)
    else:
        _set(result, key, plain, override.value())


def _select(result: Overrides, group: str, option: object, config_dir: Path) -> None:
    options = options_of(group, config_dir)
    if group == "experiment" and option is None:
        return
    if isinstance(option, str) and option in options:
        result.accepted.append(f"{group}={option}")
        return
    meant = closest_word(option, options) if isinstance(option, str) else None
    listed = choices(options) if options else "nothing (the folder is empty)"
    if not isinstance(option, str) or option == "":
        fix = f"Set single keys as {group}.KEY=VALUE, or select {listed}"
    else:
        fix = f"Did you mean {meant}?" if meant else f"Use {listed}"
    _refuse(
        result,
        group,
        option,
        f"selects a file of {config_dir / group} that is not there",
        fix,
        "config.group",
    )


def _set(result: Overrides, key: str, plain: str, value: Any) -> None:
    if follow(key) is None:
        meant, fix = _known_key(key)
        _refuse(result, key, value, "is not a setting", fix, "config.unknown-key")
        if meant is not None:
            result.wrong_keys.add(meant)
    elif holds_keys(key) and not _is_mapping(value):
        rule = "has settings of its own and takes no single value"
        _refuse(
            result,
            key,
            value,
            rule,
            f"Set the keys below it, as {key}.KEY=VALUE",
            "config.type",
        )
    elif value == {}:
        rule = "adds nothing, and an override takes no entries away"
        root = key.partition(".")[0]
        fix = f"Leave it out; for other entries select another file, as {root}=NAME"
        _refuse(result, key, value, rule, fix, "config.override")
    elif typing.get_origin(without_none(follow(key))[0]) is list and isinstance(value, Mapping):
        _refuse(result, key, cast(Any, value), "must be a list", f"Write it as {key}=[a,b]", "config.type")
    elif any(text is None for text in _names(value)):
        rule = "holds the name null, and nothing can be called that"
        _refuse(result, key, value, rule, "Rename it", "config.name")
    elif any(runs_something(text) for text in _texts(value)):
        rule = "holds '${...}' with more than a plain key, and nothing in a value is ever run"
        _refuse(result, key, value, rule, "Write the value itself", "config.interpolation")
    else:
        result.accepted.append(f"++{plain}")


def _known_key(key: str) -> tuple[str | None, str]:
    """The setting that an unknown key probably means, and the advice to give."""
    meant = suggest_key(key)
    return meant, f"Did you mean {meant}?" if meant else f"Settings begin with {choices(_roots())}"


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def _refuse(
    result: Overrides, key: str, value: object, rule: str, fix: str, id: str, *, text_only: bool = False
) -> None:
    result.problems.append(ConfigProblem("" if text_only else key, value, rule, fix, id))
    if key:
        result.wrong_keys.add(key)


def _unreadable_fix(text: str) -> str:
    if text.startswith("-"):
        return "Options such as --config-dir come before the overrides; settings have no dashes"
    if "=" not in text:
        return "Write KEY=VALUE"
    if _LONG_NUMBER.search(text):
        return "Write a shorter number"
    return "Put quotes around values with spaces or signs: KEY=\"'VALUE'\""


def _roots() -> list[str]:
    return list(dict.fromkeys(key.partition(".")[0] for key in flattened()))


def _names(value: Any) -> Iterator[object]:
    """Names of all mappings within a value."""
    if isinstance(value, Mapping):
        yield from cast("Mapping[object, object]", value)
        value = list(cast("Mapping[object, object]", value).values())
    for entry in cast("list[object]", value) if isinstance(value, list) else ():
        yield from _names(entry)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, entry in cast("Mapping[object, object]", value).items():
            yield from _texts(name)
            yield from _texts(entry)
    elif isinstance(value, list):
        for entry in cast("list[object]", value):
            yield from _texts(entry)
    elif isinstance(value, str):
        yield value
