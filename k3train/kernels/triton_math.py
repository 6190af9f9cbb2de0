"""Functions of fp32 numbers in one instruction of a GPU each, for kernels that instructions bound.

Import only where a GPU is: this imports Triton.
"""

# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exp2(x):
    """2^x to 2 units in the last place; results below 2^-126 are zero."""
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def reciprocal(x):
    """1 / x to 1 unit in the last place; results below 2^-126 are zero."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def exp(x):
    """e^x; the rounding of x log2(e) adds |x| units in the last place to those of ``exp2``."""
    return exp2(x * 1.4426950408889634)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return reciprocal(1.0 + exp2(x * -1.4426950408889634))
