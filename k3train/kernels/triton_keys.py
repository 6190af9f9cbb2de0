"""Keys and values of multi-head latent attention as Triton kernels. Import only where a GPU is: this imports
Triton. Legend as in ``keys``.
"""

# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS = 16
"""Heads that a program works on at once."""


def forward(kv: Tensor, shared: Tensor, heads: int, own: int) -> Tensor:
    """Keys [n, h, d + s] from ``kv`` [n, h * (d + e)] and ``shared`` [n, s], whose rows may be longer."""
    n, channels = shared.shape
    k = torch.empty(n, heads, own + channels, dtype=kv.dtype, device=kv.device)
    if n:
        _keys_forward[(n, triton.cdiv(heads, _HEADS))](
            kv, kv.stride(0), kv.shape[1] // heads, shared, shared.stride(0), k, heads, own, own + channels,
            HEADS=_HEADS, BLOCK=triton.next_power_of_2(own + channels),
        )  # fmt: skip
    return k


def backward(grad_k: Tensor, grad_v: Tensor, own: int) -> tuple[Tensor, Tensor]:
    """Gradients of ``kv`` and ``shared`` from those of k [n, h, d + s] and v [n, h, e], of unit channel
    stride."""
    n, heads, width = grad_k.shape
    values = grad_v.shape[2]
    grad_kv = torch.empty(n, heads * (own + values), dtype=grad_k.dtype, device=grad_k.device)
    grad_shared = torch.empty(n, width - own, dtype=grad_k.dtype, device=grad_k.device)
    if n:
        _keys_backward[(n,)](
            grad_k, *grad_k.stride()[:2], grad_v, *grad_v.stride()[:2], grad_kv, grad_shared,
            heads, own, width, values,
            HEADS=_HEADS, BLOCK=triton.next_power_of_2(width), VALUES=triton.next_power_of_2(values),
        )  # fmt: skip
    return grad_kv, grad_shared


@triton.jit
def _keys_forward(
    kv, kv_stride, head_stride, shared, shared_stride, k, heads, own, width,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    channel = tl.arange(0, BLOCK)[None, :]
    here = head < heads
    at = kv + row * kv_stride + head * head_stride + channel
    mine = tl.load(at, mask=here & (channel < own), other=0.0)
    inside = (channel >= own) & (channel < width)
    common = tl.load(shared + row * shared_stride + channel - own, mask=inside, other=0.0)
    key = tl.where(channel < own, mine, common)
    tl.store(k + (row * heads + head) * width + channel, key, mask=here & (channel < width))


@triton.jit
def _keys_backward(
    grad_k, k_row, k_head, grad_v, v_row, v_head, grad_kv, grad_shared, heads, own, width, values,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)[None, :]
    value = tl.arange(0, VALUES)[None, :]
    total = tl.zeros([HEADS, BLOCK], tl.float32)
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)[:, None]
        here = head < heads
        g = tl.load(grad_k + row * k_row + head * k_head + channel, mask=here & (channel < width), other=0.0)
        total += g.to(tl.float32)
        at = grad_kv + (row * heads + head) * (own + values)
        tl.store(at + channel, g, mask=here & (channel < own))
        g = tl.load(grad_v + row * v_row + head * v_head + value, mask=here & (value < values), other=0.0)
        tl.store(at + own + value, g, mask=here & (value < values))
    shared = tl.sum(total, 0)[None, :].to(grad_shared.dtype.element_ty)
    at = grad_shared + row * (width - own) + channel - own
    tl.store(at, shared, mask=(channel >= own) & (channel < width))
