"""A barrier of bulk copies must keep its shared memory until its kernel ends.

Once a barrier has been waited for, the compiler gives its place to layout conversions unless it is used
again; under load those eight bytes then changed while a conversion used them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import k3train.kernels.kda

FOLDER = Path(k3train.kernels.kda.__path__[0])
MAKERS = {"ring", "init"}
WAITS = {"arrived", "wait"}
ENDS = {"dismiss", "invalidate"}


def _calls(tree: ast.AST, names: set[str]) -> Iterator[ast.Call]:
    """Calls of functions of ``triton_ring``, or of ``mbarrier``, by the function's own name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            of = node.func
            own = of.attr if isinstance(of, ast.Attribute) and ast.unparse(of.value) == "mbarrier" else None
            if (of.id if isinstance(of, ast.Name) else own) in names:
                yield node


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _made(function: ast.FunctionDef) -> set[str]:
    """Variables that hold barriers: what ``ring`` returns, alone or in a tuple, and what ``init`` got."""
    made = {name for call in _calls(function, {"init"}) for name in _names(call.args[0])}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and any(_calls(node.value, {"ring"})):
            made |= _names(node.targets[0])
    return made


def _ended(function: ast.FunctionDef, after: int) -> set[str]:
    """Variables given up behind line ``after``, with the members of tuples."""
    names = {name for call in _calls(function, ENDS) if call.lineno > after for name in _names(call.args[0])}
    for node in ast.walk(function):
        is_tuple = isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        if is_tuple and _names(node.targets[0]) <= names:
            names |= _names(node.value)
    return names


KERNELS = [
    pytest.param(node, id=node.name)
    for path in sorted(FOLDER.glob("triton_*.py"))
    if path.name != "triton_ring.py"
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.FunctionDef) and any(_calls(node, MAKERS))
]


def test_there_are_kernels_with_barriers() -> None:
    assert len(KERNELS) >= 7


@pytest.mark.parametrize("kernel", KERNELS)
def test_barriers_are_given_up_at_the_end(kernel: ast.FunctionDef) -> None:
    last_wait = max(call.lineno for call in _calls(kernel, WAITS))
    kept = _made(kernel) - _ended(kernel, last_wait)
    assert not kept, f"{kernel.name} does not end {kept}"
