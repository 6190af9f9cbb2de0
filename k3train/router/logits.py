"""Routers' logits in fp32 at the speed of bf16 matrix products."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import router_gating_linear
from torch import Tensor

from k3train.backend.derivative import once_differentiable


def router_logits(tokens: Tensor, weight: Tensor) -> Tensor:
    """tokens [n, input] times weight [experts, input] in the weight's dtype: [n, experts].

    On a GPU bf16 tokens and an fp32 weight are multiplied in three bf16 products with fp32 sums: the same
    numbers to fp32's rounding, several times faster than one fp32 product.
    """
    if not tokens.numel():  # megatron-core's product cannot, and kernels are not launched for nothing
        return tokens.to(weight.dtype) @ weight.T
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
        by_term = _product(tokens, split_terms(weight, (2, 1, 0), across=False).T)
        return _sum(*by_term.split(weight.shape[0], 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Of tokens in bf16 and of the weight in fp32."""
        tokens, weight = ctx.saved_tensors
        experts = weight.shape[0]
        grad = split_terms(grads[0], (0, 0, 1, 2), across=True)
        to_tokens = grad[:, : 3 * experts] @ split_terms(weight, (0, 1, 0), across=False)
        large, middle, small = _product(grad[:, experts:].T, tokens).split(experts)
        return to_tokens, _sum(small, middle, large)


def split_terms(x: Tensor, terms: tuple[int, ...], *, across: bool) -> Tensor:
    """fp32 ``x`` [a, b] as three bf16 matrices of falling size whose sum it is: those that ``terms`` names, 0
    the largest, side by side (``across``) or one below the other."""
    if x.is_cuda:
        from k3train.router import triton_router

        return triton_router.split(x, terms, across=across)
    parts = []
    for _ in range(3):
        parts.append(x.bfloat16())
        x = x - parts[-1].float()
    return torch.cat([parts[term] for term in terms], dim=1 if across else 0)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Of bf16 matrices, in fp32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def _sum(small: Tensor, middle: Tensor, large: Tensor) -> Tensor:
    """The smallest first."""
    if small.is_cuda:
        from k3train.router import triton_router

        return triton_router.add_terms(small, middle, large)
    return (small + middle).add_(large)
