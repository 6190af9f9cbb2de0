"""Routers' logits in fp32 at the speed of bf16 matrix products."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import router_gating_linear
from torch import Tensor


def router_logits(tokens: Tensor, weight: Tensor) -> Tensor:
    """tokens [n, input] times weight [experts, input] in the weight's dtype: [n, experts].

    On a GPU bf16 tokens and an fp32 weight are multiplied in three bf16 products with fp32 sums: the same
    numbers to fp32's rounding, several times faster than one fp32 product.
    """
    if tokens.is_cuda and tokens.dtype is torch.bfloat16 and weight.dtype is torch.float32:
        return SplitLinear.apply(tokens, weight)  # pyright: ignore[reportReturnType]
    return router_gating_linear(tokens, weight, None, weight.dtype)


class SplitLinear(torch.autograd.Function):
    """tokens bf16 [n, input] and weight fp32 [experts, input] to fp32 [n, experts].

    Three bf16 terms hold all 24 bits of an fp32 number, and a product of two bf16 numbers is exact in fp32.
    The tokens' gradient, rounded to bf16 at the end, leaves out what is below 2^-16 of a product.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        """Products with all three terms at once, then their sum."""
        ctx.save_for_backward(tokens, weight)
        return _sum(_product(tokens, _terms(weight, 3).flatten(0, 1).T).unflatten(1, (3, -1)), dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Of tokens in bf16 and of the weight in fp32."""
        tokens, weight = ctx.saved_tensors
        grad, weights = _terms(grads[0], 3), _terms(weight, 2)
        by_term = _product(grad.transpose(1, 2).flatten(0, 1), tokens).unflatten(0, (3, -1))
        wide = torch.cat((grad[0], grad[0], grad[1]), dim=1)
        to_tokens = wide @ torch.cat((weights[0], weights[1], weights[0]))
        return to_tokens, _sum(by_term, dim=0)


def _terms(x: Tensor, count: int) -> Tensor:
    """fp32 [a, b] as ``count`` bf16 matrices [count, a, b] of falling size whose sum it is."""
    terms = []
    for _ in range(count):
        terms.append(x.bfloat16())
        x = x - terms[-1].float()
    return torch.stack(terms)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Of bf16 matrices, in fp32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def _sum(parts: Tensor, dim: int) -> Tensor:
    """Of three terms, the smallest first."""
    large, middle, small = parts.unbind(dim)
    return (small + middle).add_(large)
