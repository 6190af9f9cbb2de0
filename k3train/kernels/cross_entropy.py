"""Cross entropy from hidden states, so that the logits of a long sequence never exist at once.

Legend: n tokens, c channels, v vocabulary rows of this tensor-parallel rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

IGNORED = -100
"""Label of a token without a loss."""
CHUNK_ELEMENTS = 2**27
"""Logits that exist at once on a rank: half a GiB in fp32."""


def cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, tp_group: Any) -> Tensor:
    """Per-token negative log likelihood under logits ``hidden @ weight.T``, fp32 [n]; 0 where ignored.

    hidden [n, c], the same on every rank of ``tp_group``; weight [v, c], this rank's rows of the vocabulary;
    labels int [n] over the whole vocabulary. Every rank of ``tp_group`` must call this. The gradient of
    ``hidden`` covers this rank's vocabulary only and must be summed over ``tp_group``.

    Works on chunks of tokens and makes each chunk's logits again in the backward pass.
    """
    out = _CrossEntropy.apply(hidden, weight, labels, tp_group)
    assert isinstance(out, Tensor)
    return out


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, tp_group: Any) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        normalizer = torch.empty(hidden.shape[0], dtype=wide, device=hidden.device)
        loss = torch.empty_like(normalizer)
        for part in _chunks(hidden, weight):
            logits = (hidden[part] @ weight.T).to(wide)
            top = _reduce(logits.amax(-1), tp_group, dist.ReduceOp.MAX)
            index, mine = _local_labels(labels[part], weight, tp_group)
            picked = logits.gather(-1, index[:, None])[:, 0] * mine
            total = logits.sub_(top[:, None]).exp_().sum(-1)
            total, picked = _reduce(torch.stack([total, picked]), tp_group, dist.ReduceOp.SUM)
            normalizer[part] = total.log() + top
            loss[part] = (normalizer[part] - picked) * (labels[part] != IGNORED)
        ctx.save_for_backward(hidden, weight, labels, normalizer)
        ctx.tp_group = tp_group
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight, labels, normalizer = ctx.saved_tensors
        grad = grad * (labels != IGNORED)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=normalizer.dtype)
        for part in _chunks(hidden, weight):
            logits = (hidden[part] @ weight.T).to(normalizer.dtype)
            index, mine = _local_labels(labels[part], weight, ctx.tp_group)
            grad_logits = logits.sub_(normalizer[part, None]).exp_()
            grad_logits.scatter_add_(-1, index[:, None], -mine[:, None].to(grad_logits.dtype))
            grad_logits = grad_logits.mul_(grad[part, None]).to(hidden.dtype)
            grad_hidden[part] = grad_logits @ weight
            grad_weight += grad_logits.T @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    tokens = max(1, CHUNK_ELEMENTS // weight.shape[0])
    return [slice(start, start + tokens) for start in range(0, hidden.shape[0], tokens)]


def _local_labels(labels: Tensor, weight: Tensor, tp_group: Any) -> tuple[Tensor, Tensor]:
    """Row of each label in this rank's weight (0 if elsewhere or ignored), and whether it is here."""
    local = labels.long() - tp_group.rank() * weight.shape[0]
    mine = (local >= 0) & (local < weight.shape[0])
    return local * mine, mine


def _reduce(x: Tensor, tp_group: Any, op: Any) -> Tensor:
    if tp_group.size() > 1:
        dist.all_reduce(x, op=op, group=tp_group)
    return x
