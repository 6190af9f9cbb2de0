"""A run of the tests' own, so that tuning a configuration file changes no test."""

from __future__ import annotations

import copy
from typing import Any

from k3train.config.build import Builder, to_plain
from k3train.config.schema import Run

STAGES: dict[str, Any] = {
    "s256": {"context_tokens": 256, "tokens": 163_840, "batch_tokens": 4_096, "micro_batch_sequences": 8},
    "s2048": {"context_tokens": 2_048, "tokens": 65_536, "batch_tokens": 8_192, "parallel": {"ep": 2}},
    "s8192": {"context_tokens": 8_192, "tokens": 65_536, "batch_tokens": 16_384, "parallel": {"cp": 2}},
    "s32768": {"context_tokens": 32_768, "tokens": 65_536, "batch_tokens": 32_768, "parallel": {"cp": 2}},
}
"""40, 8, 4 and 2 steps."""


def four_stage_run(changes: dict[str, Any] | None = None) -> Run:
    """The schema's defaults with sources and four stages on two ranks, and ``changes`` (key: plain value).

    A value of ``...`` takes the key out.
    """
    tree = to_plain(Run())
    tree["dir"] = "runs/debug"
    tree["cluster"]["ranks_per_node"] = 2
    tree["data"]["sources"] = {name: {"path": f"corpus/{name}"} for name in ("prose", "docs", "code")}
    tree["data"]["heldout"] = {"heldout": "corpus/heldout"}
    tree["curriculum"].update(stages=copy.deepcopy(STAGES), order=list(STAGES))
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
