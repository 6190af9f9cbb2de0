"""A barrier of bulk copies must keep its shared memory until its kernel ends.

Once a barrier has been waited for, the compiler gives its place to layout conversions unless it is used
again; under load those eight bytes then changed while a conversion used them.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import k3train.kernels.kda

FOLDER = Path(k3train.kernels.kda.__path__[0])


def _uses(function: ast.FunctionDef) -> dict[str, dict[str, int]]:
    """Last line of each ``mbarrier`` call by its name and its barrier's."""
    found: dict[str, dict[str, int]] = {}
    for node in ast.walk(function):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "mbarrier" and node.args:
            barrier = node.args[0]
            while not isinstance(barrier, ast.Name):
                barrier = barrier.func if isinstance(barrier, ast.Call) else barrier.value  # pyright: ignore
            lines = found.setdefault(node.func.attr, {})
            lines[barrier.id] = max(node.lineno, lines.get(barrier.id, 0))
    return found


KERNELS = [
    pytest.param(node, id=node.name)
    for path in sorted(FOLDER.glob("triton_*.py"))
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.FunctionDef) and "init" in _uses(node)
]


def test_there_are_kernels_with_barriers() -> None:
    assert len(KERNELS) >= 6


@pytest.mark.parametrize("kernel", KERNELS)
def test_barriers_are_given_up_at_the_end(kernel: ast.FunctionDef) -> None:
    uses = _uses(kernel)
    last_wait = max(uses["wait"].values())
    for barrier in uses["init"]:
        assert uses.get("invalidate", {}).get(barrier, 0) > last_wait, f"{kernel.name}: {barrier}"
