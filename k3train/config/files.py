"""Reading YAML that a user wrote: as data only, and never more of it than a configuration needs."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, cast

import yaml

from k3train.config.problems import ConfigProblem, shown

MAX_BYTES = 1_000_000
"""Largest configuration file."""
_MAX_DIGITS = 1000
"""Longest whole number that is read: far beyond any setting, and within what Python prints."""

_PLAIN_REFERENCE = re.compile(r"\$\{\s*[\w.\[\]-]+\s*\}")


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses repeated and empty keys, says where a value stands that cannot be one, and reads
    1e-5 as a number."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Value of the node."""
        if node.tag.endswith(":int") and len(node.value) > _MAX_DIGITS:
            raise _wrong(f"a number of {len(node.value):,} digits", node)
        try:
            return cast("Any", super().construct_object(node, deep=deep))  # pyright: ignore[reportUnknownMemberType]
        except (ValueError, TypeError, OverflowError) as error:
            raise _wrong(str(error), node) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Mapping of the node, each of whose keys may stand there once."""
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key is None or key == "" or not isinstance(key, Hashable):
                raise _wrong(f"{shown(key)} is no key", key_node)
            if key in seen:
                raise _wrong(f"repeated key {key}", key_node)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _wrong(what: str, node: yaml.Node) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, what, node.start_mark)


_Loader.yaml_implicit_resolvers = {  # a date is text, as Hydra reads it
    sign: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for sign, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(  # pyright: ignore[reportUnknownMemberType]
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\d[\d_]*)(?:\.\d*)?[eE][-+]?\d+"),
    list("-+0123456789"),
)


def read_mapping(path: Path) -> tuple[dict[str, object], list[ConfigProblem]]:
    """Mapping in a YAML file, and why it cannot be read. An empty file is an empty mapping."""
    text, problems = _read_text(path)
    if problems:
        return {}, problems
    try:
        tree = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError) as error:
        return {}, [
            _file_problem(path, f"is not valid YAML: {_first_words(error, text)}", "Correct that line")
        ]
    if tree is None:
        return {}, []
    if not isinstance(tree, dict):
        return {}, [_file_problem(path, "must hold keys and values", "Write 'key: value' lines")]
    return cast("dict[str, object]", tree), []


def unsafe_content(path: Path) -> list[ConfigProblem]:
    """Content that is refused before anything else reads the file: size, encoding, aliases and resolvers."""
    return _read_text(path)[1]


def runs_something(text: str) -> bool:
    """Whether ``${...}`` in a value asks for more than another key's value."""
    return "${" in _PLAIN_REFERENCE.sub("", text)


def _read_text(path: Path) -> tuple[str, list[ConfigProblem]]:
    try:
        if not path.is_file():
            return "", [_file_problem(path, "is not a file", "Give a YAML file")]
        size = path.stat().st_size
        if size > MAX_BYTES:
            rule = f"has {size} bytes, more than a configuration can have ({MAX_BYTES})"
            return "", [_file_problem(path, rule, "Give a configuration file")]
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        return "", [_file_problem(path, f"is not UTF-8 (byte {error.start})", "Save it as UTF-8")]
    except OSError as error:
        return "", [
            _file_problem(path, f"cannot be read: {error.strerror}", "Check the path and its permissions")
        ]
    return text, _unsafe_events(path, text)


def _unsafe_events(path: Path, text: str) -> list[ConfigProblem]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        for event in cast("Iterator[Any]", yaml.parse(text, Loader=loader)):  # pyright: ignore[reportUnknownMemberType]
            where = f"line {event.start_mark.line + 1}"
            if isinstance(event, yaml.AliasEvent):
                return [_file_problem(path, f"uses a YAML alias in {where}", "Write the value out")]
            if isinstance(event, yaml.ScalarEvent) and runs_something(str(event.value)):
                rule = f"has '{event.value}' in {where}, and only a plain ${{key}} may stand in a value"
                return [_file_problem(path, rule, "Write the value itself")]
            if getattr(event, "tag", None) is not None:
                tag = event.tag.replace("tag:yaml.org,2002:", "!!")
                rule = f"uses the YAML tag {tag} in {where}{_at(event.start_mark, text)}"
                return [_file_problem(path, rule, "Write a plain value, mapping or list")]
    except (yaml.YAMLError, RecursionError) as error:
        return [_file_problem(path, f"is not valid YAML: {_first_words(error)}", "Correct that line")]
    return []


def _file_problem(path: Path, rule: str, fix: str) -> ConfigProblem:
    return ConfigProblem("", str(path), f"{path} {rule}", fix, "config.file")


def _first_words(error: Exception, text: str = "") -> str:
    mark = getattr(error, "problem_mark", None)
    reason = getattr(error, "problem", None) or (str(error).splitlines() or [type(error).__name__])[0]
    if mark is None:
        return str(reason)
    where = _at(mark, text) if isinstance(error, yaml.constructor.ConstructorError) else ""
    return f"{reason} (line {mark.line + 1}{where})"


def _at(mark: Any, text: str) -> str:
    """Path of keys to the value that begins at ``mark``, or to the mapping whose key does, as ", at a.b"."""
    top = cast("Any", yaml.compose(text, Loader=yaml.SafeLoader))  # pyright: ignore[reportUnknownMemberType]
    nodes: list[tuple[str, Any]] = [("", top)]
    for path, node in nodes:
        if (node.start_mark.line, node.start_mark.column) == (mark.line, mark.column) and path:
            return f", at {path}"
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                inner = f"{path}.{key.value}" if path else str(key.value)
                nodes += [(path, key), (inner, value)]
        elif isinstance(node, yaml.SequenceNode):
            nodes += [(f"{path}.{index}", value) for index, value in enumerate(node.value)]
    return ""
