"""Runs with a few settings changed, without composing again."""

from __future__ import annotations

import copy
import functools
from typing import Any

from k3train.config.build import Builder, to_plain
from k3train.config.compose import compose
from k3train.config.schema import Run


@functools.cache
def _debug() -> dict[str, Any]:
    return to_plain(compose([]))


def debug_run(changes: dict[str, Any] | None = None) -> Run:
    """The debug run with ``changes`` (key: plain value); a value of ``...`` takes the key out."""
    tree = copy.deepcopy(_debug())
    for key, value in (changes or {}).items():
        node = tree
        *parents, last = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        if value is ...:
            del node[last]
        else:
            node[last] = copy.deepcopy(value)
    builder = Builder()
    run = builder.build(tree)
    assert builder.problems == []
    return run
