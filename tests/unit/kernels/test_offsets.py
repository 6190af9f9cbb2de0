"""Places beyond 2^31 elements: offsets in kernels are 64 bits wide before they are large."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import k3train.kernels.kda
from tests.interpreted import interpret, needs_triton

SIZES = {"C", "D", "V", "BV"}
"""Compile-time sizes that with H, the heads, make tokens or states into elements."""
SMALL = {"rO", "rl"}
"""Numbers of rows within a chunk."""


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


PRODUCTS = [
    pytest.param(node, id=f"{path.stem}-{node.lineno}")
    for path in sorted(Path(k3train.kernels.kda.__path__[0]).glob("triton_*.py"))
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.BinOp)
    and isinstance(node.op, ast.Mult)
    and "H" in _names(node.right)
    and _names(node.right) & SIZES
    and not _names(node.right) - SIZES - {"H"}
    and _names(node.left) - SIZES - {"H", "h", "d"}
]


def test_there_are_products() -> None:
    assert len(PRODUCTS) >= 10


@pytest.mark.parametrize("product", PRODUCTS)
def test_tokens_times_channels_are_64_bits_wide(product: ast.BinOp) -> None:
    wide = any(isinstance(node, ast.Attribute) and node.attr == "int64" for node in ast.walk(product.left))
    assert wide or _names(product.left) <= SMALL, ast.unparse(product)


PROGRAM = """
import torch
from k3train.kernels import triton_conv, triton_gated_norm, triton_mix, triton_partial, triton_rms_norm
from k3train.kernels import triton_situ
# it would copy all of the memory onto itself
interpreter.GridExecutor._restore_args_dev = lambda *_: None
torch.manual_seed(0)
STEP = 2**30 + 8  # elements from row to row: the third row begins beyond 2^31
memory = torch.empty(2 * STEP + 1024, dtype=torch.bfloat16)
used = 0


def far(c=16):
    global used
    x = memory.as_strided((3, c), (STEP, 1), used)
    used += c
    x.copy_(torch.randn(3, c))
    return x


def same(kernel, *xs):
    def flat(out):
        return [y for x in out if x is not None for y in (flat(x) if isinstance(x, (list, tuple)) else [x])]

    outs = [flat(kernel(*given)) for given in (xs, [x.clone() for x in xs])]
    assert all(not x.is_contiguous() for x in xs)
    assert all(torch.equal(a, b) and a.abs().sum() > 0 for a, b in zip(*outs, strict=True)), kernel


weight = torch.randn(16)
same(lambda x: triton_rms_norm.forward(x, weight, 1e-5), far())
same(lambda g, x: triton_rms_norm.backward(g, x, weight, weight[:3]), far(), far())
same(lambda *xs: triton_mix.forward(list(xs), weight, 1e-5), far(), far())
out, logs = torch.randn(3, 16).bfloat16(), torch.randn(3)
same(lambda g, *xs: triton_mix.backward(g, list(xs), weight, out, logs, 1e-5), far(), far(), far())
same(lambda g, u: [triton_situ.forward(g, u, 4.0, 25.0, weight[:3])], far(), far())
same(lambda g, u: triton_situ.backward(out, g, u, 4.0, 25.0, weight[:3]), far(), far())
rows, head = torch.randn(6, 8).bfloat16(), torch.randn(8)
same(lambda g: [triton_gated_norm.forward(rows, head, g, 1e-5)], far())
same(lambda g: triton_gated_norm.backward(rows, rows, head, g, 1e-5), far())
taps, position = torch.randn(32, 4), torch.arange(3)
same(lambda a, b: [triton_conv.forward((a[None], b[None]), taps, position)], far(), far())
grads = (out[None], out[None])
same(lambda a, b: triton_conv.backward(grads, (a[None], b[None]), taps, position), far(), far())
partial, total = far(), torch.empty(16)  # the first columns of long rows
triton_partial._add_up[(1,)](partial, total, 3, STEP, ROWS=256, COLUMNS=16)
torch.testing.assert_close(total, partial.float().sum(0))
print("same")
"""


@needs_triton
def test_rows_lie_as_far_apart_as_they_like() -> None:
    done = interpret(PROGRAM)
    assert done.stdout.strip() == "same", done.stderr[-3000:]
