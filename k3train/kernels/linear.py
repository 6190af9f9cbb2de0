"""Projections of one input: one product where weights lie side by side, one gradient of the input."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from k3train.backend.derivative import once_differentiable
from k3train.config.schema import Fp8
from k3train.kernels import fp8
from k3train.kernels.adjacent import joined, runs
from k3train.kernels.main_grad import weight_gradients


def linear(x: Tensor, weight: Tensor, recipe: Fp8 = Fp8.none) -> Tensor:
    """x [..., k] times weight [m, k] transposed: [..., m]. As ``linears``."""
    return linears(x, [weight], recipe)[0]


def linears(
    x: Tensor, weights: Sequence[Tensor], recipe: Fp8 = Fp8.none, *, exact: int = 0
) -> tuple[Tensor, ...]:
    """``x`` [..., k] times each of ``weights`` [m_i, k] transposed: [..., m_i], perhaps with longer rows.

    The input's gradient is summed up inside the products. Weights' gradients go where ``main_grad`` says.
    Operands that ``fp8.fits`` are rounded by ``recipe``, but those of the last ``exact`` weights never.
    """
    rounded = len(weights) - exact
    coarse = [i for i, weight in enumerate(weights[:rounded]) if fp8.fits(recipe, x, weight)]
    if not coarse:
        return _Linears.apply(x, _PLAIN, *weights)  # pyright: ignore[reportReturnType]
    fine = [i for i in range(len(weights)) if i not in coarse]
    out: dict[int, Any] = {}
    for indices, products in ((coarse, fp8.products(recipe)), (fine, _PLAIN)):
        if indices:
            found: Any = _Linears.apply(x, products, *(weights[i] for i in indices))
            out |= dict(zip(indices, found, strict=True))
    return tuple(out[i] for i in range(len(weights)))


class _Plain:
    """Products of operands as they are; see ``fp8.Products``."""

    def input(self, rows: Tensor) -> Tensor:
        return rows

    def output(self, rows: Tensor, weight: Tensor) -> Tensor:
        return F.linear(rows, weight)

    def kept(self, rows: Tensor) -> Tensor:
        return rows

    def gradient(self, grad: Tensor) -> Tensor:
        return grad

    def input_gradient(self, grad: Tensor, weight: Tensor, total: Tensor | None) -> Tensor:
        return grad @ weight if total is None else total.addmm_(grad, weight)

    def weight_gradients(self, weights: Sequence[Tensor], grad: Tensor, rows: Tensor) -> list[Tensor]:
        return weight_gradients(weights, grad, rows)


_PLAIN = _Plain()


class _Linears(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, products: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.products = products
        out: list[Tensor] = [x] * len(weights)
        rows = products.input(x.reshape(-1, x.shape[-1]))
        for run in runs(weights, 0):
            whole = joined([weights[i] for i in run], 0)
            assert whole is not None
            product = products.output(rows, whole).view(*x.shape[:-1], whole.shape[0])
            parts = product.split([weights[i].shape[0] for i in run], -1)
            for i, part in zip(run, parts, strict=True):
                out[i] = part
        return tuple(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        products, needs = ctx.products, ctx.needs_input_grad[:1] + ctx.needs_input_grad[2:]
        rows = products.kept(x.reshape(-1, x.shape[-1])) if any(needs[1:]) else None
        flat = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        grad_x, grad_weights = None, [None] * len(weights)
        for run in _pieces(weights, flat, needs[1:]):
            grad, weight = joined([flat[i] for i in run], -1), joined([weights[i] for i in run], 0)
            assert grad is not None
            assert weight is not None
            grad = products.gradient(grad)
            if needs[0]:
                grad_x = products.input_gradient(grad, weight, grad_x)
            if needs[1 + run[0]]:
                found = products.weight_gradients([weights[i] for i in run], grad, rows)
                for i, each in zip(run, found, strict=True):
                    grad_weights[i] = each  # pyright: ignore
        return None if grad_x is None else grad_x.view(x.shape), None, *grad_weights


def _pieces(weights: list[Tensor], grads: list[Tensor], trained: Sequence[bool]) -> list[list[int]]:
    """Runs of weights, cut where the gradients of their outputs do not lie side by side, and between weights
    that are ``trained`` and others."""
    pieces: list[list[int]] = []
    for run in runs(weights, 0):
        pieces.append([run[0]])
        for before, i in pairwise(run):
            if trained[before] != trained[i] or joined([grads[before], grads[i]], -1) is None:
                pieces.append([i])
            else:
                pieces[-1].append(i)
    return pieces
