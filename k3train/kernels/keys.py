"""Keys of multi-head latent attention: channels of each head's own beside channels that all heads share.

Legend: n tokens, h heads, d own and s shared channels of a key, e channels of a value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3train.backend.derivative import once_differentiable


def keys_and_values(kv: Tensor, shared: Tensor, heads: int, own: int) -> tuple[Tensor, Tensor]:
    """k [n, h, d + s] and v [n, h, e], which lies in ``kv`` still.

    ``kv`` [n, h * (d + e)] has a head's key channels (``own`` = d) before its values, ``shared`` is [n, s].
    In bf16 on a GPU one kernel in each direction, which keep nothing.
    """
    if kv.is_cuda and kv.dtype is shared.dtype is torch.bfloat16:
        return _KeysAndValues.apply(kv, shared, heads, own)  # pyright: ignore[reportReturnType]
    k, v = _by_head(kv, heads).tensor_split([own], dim=-1)
    return torch.cat([k, shared[:, None].expand(-1, heads, -1)], dim=-1), v


def _by_head(x: Tensor, heads: int) -> Tensor:
    return x.view(x.shape[0], heads, -1)


class _KeysAndValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kv: Tensor, shared: Tensor, heads: int, own: int) -> tuple[Tensor, Tensor]:
        from k3train.kernels import triton_keys

        ctx.own = own
        k = triton_keys.forward(kv, shared, heads, own)
        return k, _by_head(kv.detach(), heads)[..., own:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        from k3train.kernels import triton_keys

        grad_k, grad_v = (grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
        return *triton_keys.backward(grad_k, grad_v, ctx.own), None, None
