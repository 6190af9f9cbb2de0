"""Rows of an embedding, whose gradient touches the rows of its tokens and no others."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from k3train.backend.derivative import once_differentiable
from k3train.kernels.main_grad import added, main_grad


def embed(tokens: Tensor, weight: Tensor) -> Tensor:
    """Rows of ``weight`` [v, c] for ``tokens``, int64 [...]: [..., c], and zeros for tokens outside [0, v).

    The gradient goes where ``main_grad`` says, summed up in the order of the tokens.
    """
    out = _Embed.apply(tokens, weight)
    assert isinstance(out, Tensor)
    return out


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        mine = _mine(tokens, weight)
        return F.embedding(torch.where(mine, tokens, 0), weight).masked_fill_(~mine[..., None], 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        tokens, weight = ctx.saved_tensors
        tokens, grad, total = tokens.flatten(), grad.flatten(0, -2), main_grad(weight)
        mine = _mine(tokens, weight)
        if total is None:
            grad = grad.masked_fill(~mine[:, None], 0)
            rows = torch.where(mine, tokens, 0)
            return None, torch.ops.aten.embedding_dense_backward(grad, rows, weight.shape[0], -1, False)
        if grad.is_cuda:
            from k3train.kernels.triton_embedding import add_rows

            add_rows(total, grad, torch.where(mine, tokens, weight.shape[0]))
        else:
            total.index_add_(0, tokens[mine], grad[mine].to(total.dtype))
        return None, added(weight)


def _mine(tokens: Tensor, weight: Tensor) -> Tensor:
    return (tokens >= 0) & (tokens < weight.shape[0])
