"""Projections of one input: one product where weights lie side by side, one gradient of the input."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from k3train.kernels.adjacent import joined, runs
from k3train.kernels.main_grad import weight_gradients


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., k] times weight [m, k] transposed: [..., m]. As ``linears``."""
    return linears(x, [weight])[0]


def linears(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """``x`` [..., k] times each of ``weights`` [m_i, k] transposed: [..., m_i], perhaps with longer rows.

    The input's gradient is summed up inside the products. Weights' gradients go where ``main_grad`` says.
    """
    return _Linears.apply(x, *weights)  # pyright: ignore[reportReturnType]


class _Linears(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        out: list[Tensor] = [x] * len(weights)
        for run in runs(weights, 0):
            whole = joined([weights[i] for i in run], 0)
            assert whole is not None
            parts = F.linear(x, whole).split([weights[i].shape[0] for i in run], -1)
            for i, part in zip(run, parts, strict=True):
                out[i] = part
        return tuple(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        rows, needs = x.reshape(-1, x.shape[-1]), ctx.needs_input_grad
        flat = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        grad_x, grad_weights = None, [None] * len(weights)
        for run in _pieces(weights, flat):
            grad, weight = joined([flat[i] for i in run], -1), joined([weights[i] for i in run], 0)
            assert grad is not None
            assert weight is not None
            if needs[0]:
                grad_x = grad @ weight if grad_x is None else grad_x.addmm_(grad, weight)
            if all(needs[1 + i] for i in run):
                found = weight_gradients([weights[i] for i in run], grad, rows)
                for i, each in zip(run, found, strict=True):
                    grad_weights[i] = each  # pyright: ignore
        return None if grad_x is None else grad_x.view(x.shape), *grad_weights


def _pieces(weights: list[Tensor], grads: list[Tensor]) -> list[list[int]]:
    """Runs of weights, cut where the gradients of their outputs do not lie side by side."""
    pieces: list[list[int]] = []
    for run in runs(weights, 0):
        pieces.append([run[0]])
        for before, i in pairwise(run):
            if joined([grads[before], grads[i]], -1) is None:
                pieces.append([i])
            else:
                pieces[-1].append(i)
    return pieces
