"""Programs whose Triton kernels are run by Triton's interpreter on the CPU, each in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

_FIRST = """
import numpy
from triton.runtime import interpreter


def patched(tensor, scope, patch=interpreter._patch_lang_tensor):
    patch(tensor, scope)
    # numpy 2.4 no longer makes a number of an array of one
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = patched
functions = {"ex2.approx.ftz.f32": numpy.exp2, "rcp.approx.ftz.f32": numpy.reciprocal}


class Results:
    def __init__(self, x):
        self.x = x

    def get_result(self, i):
        return self.x


def instruction(self, text, constraints, values, dtype, pure, pack):
    (x,) = values
    return Results(interpreter.TensorHandle(functions[text.split()[0]](x.data), x.dtype))


interpreter.InterpreterBuilder.create_inline_asm = instruction
"""


def interpret(program: str, *, seconds: float = PATIENCE) -> subprocess.CompletedProcess[str]:
    """What ``program``, Python's text, printed and how it ended."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FIRST + program],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
