"""Plain data in, typed Run out: the only place where values become settings.

Nothing here evaluates text: a value is a word, a number, a list or a mapping and stays one.
"""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any

from k3train.config.keys import closest_word, field_types, suggest_key, without_none
from k3train.config.nearest import choices
from k3train.config.problems import ConfigProblem
from k3train.config.schema import Run

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_WORDS: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
}


class Builder:
    """Turns one tree into a Run and keeps what was wrong; wrong values are replaced by the schema's."""

    def __init__(self) -> None:
        self.problems: list[ConfigProblem] = []
        self.wrong_keys: set[str] = set()
        """Keys whose value in the built Run is not the user's; rules that read them say nothing."""

    def build(self, tree: object) -> Run:
        """The Run that the tree describes, as far as it can be read."""
        run = self._object(Run, tree, "")
        assert isinstance(run, Run)
        return run

    def _problem(self, key: str, value: object, rule: str, fix: str, id: str) -> None:
        self.problems.append(ConfigProblem(key, value, rule, fix, id))
        self.wrong_keys.add(key)

    def _object(self, cls: type, tree: object, path: str) -> object:
        hints = field_types(cls)
        given: Mapping[object, object] = {}
        if isinstance(tree, Mapping):
            given = typing.cast("Mapping[object, object]", tree)
        else:
            rule = f"is a group of settings and needs {choices(list(hints)[:3])} … below it"
            self._problem(path or "run", tree, rule, "Set the keys below it", "config.type")
        for name in given:
            if name not in hints:
                self._unknown(_join(path, str(name)), given[name])
        values: dict[str, Any] = {}
        for field in fields(cls):
            key = _join(path, field.name)
            fallback = field.default if field.default_factory is MISSING else field.default_factory()
            required = fallback is MISSING
            fallback = _zero(hints[field.name]) if required else fallback
            value = given.get(field.name)
            if field.name not in given or value == "???":
                if (required or value == "???") and isinstance(tree, Mapping):
                    rule = f"is missing: {path or 'the run'} needs it"
                    self._problem(key, None, rule, f"Set {key}", "config.missing-key")
                values[field.name] = fallback
            else:
                values[field.name] = self._value(hints[field.name], value, key, fallback)
        return cls(**values)

    def _unknown(self, key: str, value: object) -> None:
        meant = suggest_key(key)
        fix = f"Did you mean {meant}?" if meant else "See 'k3train show' for the settings there are"
        if meant == key:
            fix = f"Write each part of {key} as a key of its own, one below the other"
        self._problem(key, value, "is not a setting", fix, "config.unknown-key")
        if meant is not None:
            self.wrong_keys.add(meant)

    def _value(self, annotation: Any, value: object, key: str, fallback: Any) -> Any:
        kind, optional = without_none(annotation)
        if value is None and optional:
            return None
        if is_dataclass(kind):
            return self._object(typing.cast(type, kind), value, key)
        origin = typing.get_origin(kind)
        if origin is dict:
            return self._dict(typing.get_args(kind)[1], value, key)
        if origin is list:
            return self._list(typing.get_args(kind)[0], value, key, fallback)
        if issubclass(kind, Enum):
            return self._choice(kind, value, key, fallback)
        return self._scalar(kind, value, key, fallback)

    def _dict(self, kind: Any, value: object, key: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            self._problem(key, value, "must be a mapping of names", f"Set {key}.NAME", "config.type")
            return {}
        entries: dict[str, Any] = {}
        for name, entry in typing.cast("Mapping[object, object]", value).items():
            entry_key = f"{key}.{name}"
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                rule = "has a name that is not letters, digits, '_' and '-'"
                self._problem(entry_key, entry, rule, "Rename it (put quotes around a number)", "config.name")
                continue
            entries[name] = self._value(kind, entry, entry_key, _zero(kind))
        return entries

    def _list(self, kind: Any, value: object, key: str, fallback: Any) -> Any:
        if not isinstance(value, list):
            self._problem(key, value, "must be a list", f"Write it as {key}=[a,b]", "config.type")
            return fallback
        entries = typing.cast("list[object]", value)
        return [
            self._value(kind, entry, f"{key}.{index}", _zero(kind)) for index, entry in enumerate(entries)
        ]

    def _choice(self, kind: type[Enum], value: object, key: str, fallback: Any) -> Any:
        names = [member.name for member in kind]
        if isinstance(value, str) and value in names:
            return kind[value]
        meant = closest_word(value, names) if isinstance(value, str) else None
        fix = f"Did you mean {meant}?" if meant else f"Use {choices(names)}"
        self._problem(key, value, f"must be one of {', '.join(names)}", fix, "config.choice")
        return fallback

    def _scalar(self, kind: type, value: object, key: str, fallback: Any) -> Any:
        if kind is float and type(value) is int:
            value = _as_float(value)
        if type(value) is kind:
            if isinstance(value, float) and not math.isfinite(value):
                self._problem(key, value, "must be a finite number", "Use a finite number", "config.finite")
                return fallback
            return value
        rule = f"must be {_WORDS[kind]} but is {_WORDS.get(type(value), _other(value))}"
        self._problem(key, value, rule, _scalar_fix(kind, value, key), "config.type")
        return fallback


def to_plain(value: object) -> Any:
    """Settings as plain dicts, lists and words, in the order of the schema; ``Builder`` reads them back."""
    if isinstance(value, Enum):
        return value.name
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {key: to_plain(entry) for key, entry in typing.cast("dict[str, object]", value).items()}
    if isinstance(value, list):
        return [to_plain(entry) for entry in typing.cast("list[object]", value)]
    return value


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _zero(kind: Any) -> Any:
    """Stand-in for a value that cannot be read; its key is recorded as wrong, so nobody judges it."""
    return None if is_dataclass(kind) else kind() if kind in (int, float, str, bool) else None


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _other(value: object) -> str:
    if value is None:
        return "null"
    return (
        "a list"
        if isinstance(value, list)
        else "a mapping"
        if isinstance(value, Mapping)
        else "something else"
    )


def _scalar_fix(kind: type, value: object, key: str) -> str:
    if kind is int and isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return f"Write it out: {key}={int(value):_}"
    if kind is str and value is not None and not isinstance(value, (list, Mapping)):
        return f"Put quotes around it: {key}=\"'{value}'\""
    if kind in (int, float) and isinstance(value, str):
        return "Write a number without quotes or units"
    return f"Give {_WORDS[kind]}"
