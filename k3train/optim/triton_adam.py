"""AdamW over many tensors in one pass, for GPUs. Import only where one is: this imports Triton."""

# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportIndexIssue=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK, _BLOCK = 32768, 2048
"""Elements of one program, and those that it works on at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The numbers of one step, those of Loshchilov & Hutter 2019, algorithm 2, at step t."""

    factor: float
    """What gradients are multiplied by as they are read."""
    rate: float
    """Learning rate over 1 - beta1^t."""
    decay: float
    """1 - learning rate * weight decay."""
    beta1: float
    beta2: float
    root: float
    """1 / sqrt(1 - beta2^t)."""
    eps: float


class Table:
    """Where tensors of one kind lie, for the kernel: parameters, gradients and both moments, all fp32 and
    contiguous, and perhaps a bf16 copy of each parameter."""

    def __init__(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        means: Sequence[Tensor],
        squares: Sequence[Tensor],
        copies: Sequence[Tensor] | None,
    ) -> None:
        kinds = [params, grads, means, squares, *([copies] if copies else [])]
        assert all(x.is_contiguous() for kind in kinds for x in kind)
        assert all(x.dtype is torch.float32 for kind in kinds[:4] for x in kind)
        assert all(x.dtype is torch.bfloat16 for x in copies or ())
        sizes = torch.tensor([p.numel() for p in params])
        places = torch.tensor([[x.data_ptr() for x in kind] for kind in kinds])
        chunks = (sizes + _CHUNK - 1) // _CHUNK
        which = torch.repeat_interleave(chunks)
        first = torch.arange(len(which)) - (chunks.cumsum(0) - chunks)[which]
        device = params[0].device
        self.copies, self.aligned = bool(copies), not bool((places % 16).any())
        self.rows = torch.stack([*places, *places[:1].expand(5 - len(kinds), -1), sizes], 1).to(device)
        self.chunks = torch.stack([which, first], 1).to(device)

    def step(self, rates: Rates) -> None:
        """Update every tensor."""
        _adamw[(len(self.chunks),)](
            self.rows, self.chunks,
            rates.factor, rates.rate, rates.decay, rates.beta1, rates.beta2, rates.root, rates.eps,
            COPIES=self.copies, ALIGNED=self.aligned, CHUNK=_CHUNK, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip


@triton.jit
def _adamw(
    rows, chunks, factor, rate, decay, beta1, beta2, root, eps,
    COPIES: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = chunks + 2 * tl.program_id(0)
    row = rows + 6 * tl.load(chunk)
    first, size = tl.load(chunk + 1) * CHUNK, tl.load(row + 5)
    p, g = _pointer(row, ALIGNED, tl.float32), _pointer(row + 1, ALIGNED, tl.float32)
    m, v = _pointer(row + 2, ALIGNED, tl.float32), _pointer(row + 3, ALIGNED, tl.float32)
    copy = _pointer(row + 4, ALIGNED, tl.bfloat16)
    # Without a mask four numbers are read at once.
    if first + CHUNK <= size:
        for start in range(0, CHUNK, BLOCK):
            i = first + start + tl.arange(0, BLOCK)
            _block(p, g, m, v, copy, i, None, factor, rate, decay, beta1, beta2, root, eps, COPIES)
    else:
        for start in range(0, CHUNK, BLOCK):
            i = first + start + tl.arange(0, BLOCK)
            _block(p, g, m, v, copy, i, i < size, factor, rate, decay, beta1, beta2, root, eps, COPIES)


@triton.jit
def _pointer(place, ALIGNED: tl.constexpr, dtype: tl.constexpr):
    pointer = tl.load(place).to(tl.pointer_type(dtype))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _block(p, g, m, v, copy, i, here, factor, rate, decay, beta1, beta2, root, eps, COPIES: tl.constexpr):
    grad = tl.load(g + i, here) * factor
    mean = beta1 * tl.load(m + i, here) + (1 - beta1) * grad
    square = beta2 * tl.load(v + i, here) + (1 - beta2) * grad * grad
    value = decay * tl.load(p + i, here) - rate * mean / (tl.sqrt(square) * root + eps)
    tl.store(m + i, mean, here)
    tl.store(v + i, square, here)
    tl.store(p + i, value, here)
    if COPIES:
        tl.store(copy + i, value.to(tl.bfloat16), here)
