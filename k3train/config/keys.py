"""The tree of keys that the schema allows: what a key path means, and which key a misspelt one meant."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from k3train.config.schema import Run

ANY_NAME = "*"
"""Stands for the name of a dict entry or the position in a list, in flattened keys."""


@cache
def field_types(cls: type) -> dict[str, Any]:
    """Type of each field of a schema class, in the order of the schema."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def without_none(annotation: Any) -> tuple[Any, bool]:
    """The type itself and whether null is allowed beside it."""
    if isinstance(annotation, types.UnionType):
        members = [member for member in typing.get_args(annotation) if member is not types.NoneType]
        assert len(members) == 1, f"the schema has a union of several types: {annotation}"
        return members[0], True
    return annotation, False


def follow(path: str) -> Any:
    """Type of the setting at ``path``, or None when the schema has no such key."""
    annotation: Any = Run
    for segment in path.split("."):
        annotation = _child(without_none(annotation)[0], segment)
        if annotation is None:
            return None
    return annotation


def holds_keys(path: str) -> bool:
    """Whether the known key ``path`` has keys below it instead of a value."""
    kind, optional = without_none(follow(path))
    return not optional and (is_dataclass(kind) or typing.get_origin(kind) is dict)


@cache
def flattened() -> tuple[str, ...]:
    """Every setting's key, with ``*`` for names that the user chooses."""
    return tuple(_leaves(Run, ""))


def suggest_key(path: str) -> str | None:
    """The known key that an unknown one most likely means, or None."""
    return _deeper(path) or _repaired(path) or _moved(path) or _closest(path)


def closest_word(word: str, words: Iterable[str]) -> str | None:
    """The most similar of ``words``, or None when none is similar."""
    found = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return found[0] if found else None


def _child(annotation: Any, segment: str) -> Any:
    if is_dataclass(annotation):
        return field_types(typing.cast(type, annotation)).get(segment)
    origin = typing.get_origin(annotation)
    if origin is dict and segment:
        return typing.get_args(annotation)[1]
    if origin is list and segment.isdecimal():
        return typing.get_args(annotation)[0]
    return None


def _leaves(annotation: Any, path: str) -> Iterator[str]:
    annotation = without_none(annotation)[0]
    if is_dataclass(annotation):
        for name, child in field_types(typing.cast(type, annotation)).items():
            yield from _leaves(child, f"{path}.{name}" if path else name)
    elif typing.get_origin(annotation) is dict:
        yield from _leaves(typing.get_args(annotation)[1], f"{path}.{ANY_NAME}")
    else:
        yield path


def _deeper(path: str) -> str | None:
    """Find the one key of this name further down: ``model.moe.top_k`` for ``model.top_k``."""
    prefix, _, name = path.rpartition(".")
    found = [
        key for key in flattened() if prefix and key.startswith(f"{prefix}.") and key.endswith(f".{name}")
    ]
    return found[0] if len(found) == 1 else None


def _repaired(path: str) -> str | None:
    """Replace each unknown segment by its most similar sibling."""
    done: list[str] = []
    annotation: Any = Run
    for segment in path.split("."):
        annotation = without_none(annotation)[0]
        if _child(annotation, segment) is None:
            siblings = field_types(typing.cast(type, annotation)) if is_dataclass(annotation) else ()
            similar = closest_word(segment, siblings)
            if similar is None:
                return None
            segment = similar
        annotation = _child(annotation, segment)
        done.append(segment)
    return ".".join(done)


def _moved(path: str) -> str | None:
    """Find the key that ends in this path, such as ``optim.learning_rate`` for ``learning_rate``."""
    parents = sorted({key.rpartition(".")[0] for key in flattened() if ANY_NAME not in key} - {""})
    roots = [parent for parent in parents if follow(f"{parent}.{path}") is not None]
    if roots and "." in path:
        return f"{roots[0]}.{path}"
    last = path.rpartition(".")[2]
    for ending in (path, last):
        ends = [key for key in flattened() if f".{key}".endswith(f".{ending}")]
        plain = [key for key in ends if ANY_NAME not in key]
        if ends:
            return min(plain or ends, key=lambda key: key.count("."))
    return f"{roots[0]}.{path}" if roots else None


def _closest(path: str) -> str | None:
    """The known key most like the path, its last name included: that of its groups alone says little."""
    last = path.rpartition(".")[2]
    similar = closest_word(path, flattened())
    if similar is not None and closest_word(last, [similar.rpartition(".")[2]]) is not None:
        return similar
    by_name = {key.rpartition(".")[2]: key for key in reversed(flattened())}
    name = closest_word(last, by_name)
    return by_name[name] if name is not None else None
