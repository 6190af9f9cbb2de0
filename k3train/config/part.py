"""Settings that a program made in Python, read and judged as those of a configuration are."""

from __future__ import annotations

from operator import attrgetter
from typing import cast

from k3train.config.build import Builder, to_plain
from k3train.config.rules import check


def read_part[Part](settings: Part, key: str) -> Part:
    """``settings``, the group of ``Run`` at ``key``, with words such as ``"sign"`` made enum members.

    Raises ValueError with every problem that ``k3train check`` would have with the group, beside the defaults
    of all others; not ConfigError, which megatron-core could not raise again when it builds a module.
    """
    tree = to_plain(settings)
    for name in reversed(key.split(".")):
        tree = {name: tree}
    builder = Builder()
    run = builder.build(tree)
    found = [*builder.problems, *check(run, wrong_keys=frozenset(builder.wrong_keys))]
    problems = [problem for problem in found if problem.key.startswith(f"{key}.")]
    if problems:
        raise ValueError("\n".join(str(problem) for problem in problems))
    return cast("Part", attrgetter(key)(run))
