"""Cross entropy from hidden states, so that the logits of a long sequence never exist at once.

Legend: n tokens, c channels, v vocabulary rows of this tensor-parallel rank.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from k3train.backend.derivative import once_differentiable
from k3train.kernels.main_grad import add_product, added, main_grad
from k3train.plan.pieces import CHUNK_ELEMENTS, KEPT_ELEMENTS

IGNORED = -100
"""Label of a token without a loss."""


def cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, tp_group: Any, *, keep: bool = False
) -> Tensor:
    """Per-token negative log likelihood under logits ``hidden @ weight.T``, fp32 [n]; 0 where ignored.

    hidden [n, c], the same on every rank of ``tp_group``; weight [v, c], this rank's rows of the vocabulary;
    labels int [n] over the whole vocabulary. Every rank of ``tp_group`` must call this. The gradient of
    ``hidden`` covers this rank's vocabulary only and must be summed over ``tp_group``.

    Works on chunks of tokens and makes each chunk's logits again in the backward pass; with ``keep`` the
    first chunk is large and its logits are kept. The weight's gradient goes where ``main_grad`` says.
    """
    out = _CrossEntropy.apply(hidden, weight, labels, tp_group, keep)
    assert isinstance(out, Tensor)
    return out


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, tp_group: Any, keep: bool
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        normalizer = torch.empty(hidden.shape[0], dtype=wide, device=hidden.device)
        loss = torch.empty_like(normalizer)
        ctx.parts, ctx.kept = _chunks(hidden, weight, keep), None
        for part in ctx.parts:
            index, mine = _local_labels(labels[part], weight, tp_group)
            logits = hidden[part] @ weight.T
            local_top, total, picked = _statistics(logits, index)
            top = _reduce(local_top.clone(), tp_group, dist.ReduceOp.MAX)
            sums = torch.stack([total * (local_top - top).exp(), picked * mine])
            total, picked = _reduce(sums, tp_group, dist.ReduceOp.SUM)
            normalizer[part] = total.log() + top
            loss[part] = (normalizer[part] - picked) * (labels[part] != IGNORED)
            if keep and part.start == 0 and any(ctx.needs_input_grad):
                ctx.kept = logits
            del logits
        ctx.save_for_backward(hidden, weight, labels, normalizer)
        ctx.tp_group = tp_group
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, normalizer = ctx.saved_tensors
        grad = grad * (labels != IGNORED)
        grad_hidden, total = torch.empty_like(hidden), main_grad(weight)
        in_place = total is not None
        if total is None:
            total = torch.zeros_like(weight, dtype=normalizer.dtype)
        for part in ctx.parts:
            index, mine = _local_labels(labels[part], weight, ctx.tp_group)
            logits, ctx.kept = ctx.kept, None  # the gradient overwrites it
            if logits is None:
                logits = hidden[part] @ weight.T
            grad_logits = _gradient(logits, index, mine, normalizer[part], grad[part])
            del logits
            torch.mm(grad_logits, weight, out=grad_hidden[part])
            add_product(total, grad_logits.T, hidden[part])
        return grad_hidden, added(weight) if in_place else total.to(weight.dtype), None, None, None


def _is_fused(x: Tensor) -> bool:
    """Kernels that read logits once, in bf16, in the place of a dozen passes over fp32 ones."""
    return x.is_cuda and x.dtype is torch.bfloat16


def _statistics(logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row: maximum, sum of exp(logit - maximum), and the logit at ``index``; fp32 or better [n]."""
    if _is_fused(logits):
        from k3train.kernels import triton_cross_entropy

        return triton_cross_entropy.statistics(logits, index)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    top = logits.amax(-1)
    picked = logits.gather(-1, index[:, None])[:, 0]
    return top, (logits - top[:, None]).exp_().sum(-1), picked


def _gradient(logits: Tensor, index: Tensor, mine: Tensor, normalizer: Tensor, grad: Tensor) -> Tensor:
    """grad * (softmax - one hot), [n, v] in the logits' dtype, from logits that may be overwritten."""
    if _is_fused(logits):
        from k3train.kernels import triton_cross_entropy

        return triton_cross_entropy.gradient_(logits, index, mine, normalizer, grad.contiguous())
    p = logits.to(normalizer.dtype).sub_(normalizer[:, None]).exp_()
    p.scatter_add_(-1, index[:, None], -mine[:, None].to(p.dtype))
    return p.mul_(grad[:, None]).to(logits.dtype)


def _chunks(hidden: Tensor, weight: Tensor, keep: bool) -> list[slice]:
    """Tokens of each chunk: multiples of 128, which fill matrix units, where that many fit."""
    tokens, small = hidden.shape[0], _tokens(CHUNK_ELEMENTS, weight)
    first = min(tokens, _tokens(KEPT_ELEMENTS, weight)) if keep else 0
    borders = [0] * (first > 0) + list(range(first, tokens, small)) + [tokens]
    return [slice(start, stop) for start, stop in pairwise(borders) if start < stop]


def _tokens(elements: int, weight: Tensor) -> int:
    tokens = elements // weight.shape[0]
    return tokens // 128 * 128 if tokens >= 128 else max(1, tokens)


def _local_labels(labels: Tensor, weight: Tensor, tp_group: Any) -> tuple[Tensor, Tensor]:
    """Row of each label in this rank's weight (0 if elsewhere or ignored), and whether it is here."""
    local = labels.long() - tp_group.rank() * weight.shape[0]
    mine = (local >= 0) & (local < weight.shape[0])
    return local * mine, mine


def _reduce(x: Tensor, tp_group: Any, op: Any) -> Tensor:
    if tp_group.size() > 1:
        dist.all_reduce(x, op=op, group=tp_group)
    return x
