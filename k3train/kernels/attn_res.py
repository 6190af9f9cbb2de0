"""Attention residuals: a softmax over depth in the place of the residual sum.

Legend: w sources (finished blocks and the running prefix), ... the token axes, c channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from k3train.backend.derivative import refuse_second
from k3train.kernels.rms_norm import as_rows, fits_row_kernel


def mix(sources: Iterable[Tensor], query: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """Average of ``sources`` weighted by softmax_i(query . RMSNorm(source_i)) per token (k3 report eq. 8-10).

    sources: w tensors [..., c] of one dtype; query and norm_weight [c], fp32. The RMSNorm is on keys only,
    with no 1/sqrt(c). Arithmetic is fp32 or better, the result [..., c] has the sources' dtype. Backward
    keeps the sources and, on a GPU, the result; it recomputes the weights. On a GPU both are one kernel.

    A single source has weight 1: it is returned, and query and norm weight get zero gradients, so that every
    parameter takes part in every backward pass. Raises ValueError for one tensor in the place of the
    sequence, for none, and for shapes that differ or do not end in c, with a token axis before it.
    """
    if isinstance(sources, Tensor):
        raise ValueError(
            f"sources is one tensor of shape {tuple(sources.shape)} and would be mixed along its first axis: "
            "pass a tuple of tensors, one per source"
        )
    sources = tuple(sources)
    _check_shapes(sources, query, norm_weight)
    out = _Mix.apply(query, norm_weight, eps, *sources)
    assert isinstance(out, Tensor)
    return out


def mix_reference(sources: list[Tensor], query: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """The same as ``mix``, as the equation reads; keeps w tensors more for backward."""
    values = torch.stack(sources).to(query.dtype)
    keys = values * (values.square().mean(-1, keepdim=True) + eps).rsqrt() * norm_weight
    weights = (keys @ query).softmax(0)
    return (weights[..., None] * values).sum(0).to(sources[0].dtype)


def _check_shapes(sources: Sequence[Tensor], query: Tensor, norm_weight: Tensor) -> None:
    if query.ndim != 1 or query.shape != norm_weight.shape:
        raise ValueError(
            f"query has shape {tuple(query.shape)} and norm_weight {tuple(norm_weight.shape)}: mix needs [c] "
            "for both"
        )
    shapes = {source.shape for source in sources}
    if len(shapes) != 1 or sources[0].ndim < 2 or sources[0].shape[-1] != len(query):
        found = ", ".join(str(tuple(source.shape)) for source in sources) or "none"
        raise ValueError(f"sources are {found}: pass one or more of one shape, [tokens ..., {len(query)}]")


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query: Tensor, norm_weight: Tensor, eps: float, *sources: Tensor) -> Tensor:
        ctx.eps = eps
        if len(sources) == 1:
            ctx.save_for_backward(query, norm_weight, None, None, *sources)
            return sources[0].view_as(sources[0])
        if fits_row_kernel(sources[0]):
            from k3train.kernels import triton_mix

            out, logsum = triton_mix.forward([as_rows(s) for s in sources], query * norm_weight, eps)
            out = out.view(sources[0].shape)
            # what comes next, a norm, keeps its input as well: the same memory
            ctx.save_for_backward(query, norm_weight, logsum, out, *sources)
            return out
        ctx.save_for_backward(query, norm_weight, None, None, *sources)
        weights = _scores(sources, query * norm_weight, eps)[0].softmax(0)
        out = torch.zeros_like(sources[0], dtype=weights.dtype)
        for weight, source in zip(weights, sources, strict=True):
            out.addcmul_(weight[..., None], source)
        return out.to(sources[0].dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, norm_weight, logsum, out, *sources = ctx.saved_tensors
        if len(sources) == 1:
            return torch.zeros_like(query), torch.zeros_like(norm_weight), None, grad
        direction = query * norm_weight
        if logsum is not None:
            from k3train.kernels import triton_mix

            refuse_second("mix on a GPU")
            rows = [as_rows(s) for s in sources]
            grad_direction, grads = triton_mix.backward(
                as_rows(grad), rows, direction, as_rows(out), logsum, ctx.eps
            )
            grads = [g.view(s.shape) for g, s in zip(grads, sources, strict=True)]
            return grad_direction * norm_weight, grad_direction * query, None, *grads
        logits, dots, scales = _scores(sources, direction, ctx.eps)
        weights = logits.softmax(0)
        wide = grad.to(direction.dtype)
        inner = torch.stack([(wide * source).sum(-1) for source in sources])
        grad_logits = weights * (inner - (weights * inner).sum(0))
        along = grad_logits * scales
        across = grad_logits * dots * scales.pow(3) / direction.numel()
        grad_direction = torch.zeros_like(direction)
        grads = []
        for i, source in enumerate(sources):
            grad_direction += along[i].flatten() @ source.flatten(0, -2).to(direction.dtype)
            piece = weights[i, ..., None] * wide
            piece.addcmul_(along[i, ..., None], direction).addcmul_(across[i, ..., None], source, value=-1)
            grads.append(piece.to(source.dtype))
        return grad_direction * norm_weight, grad_direction * query, None, *grads


def _scores(sources: tuple[Tensor, ...] | list[Tensor], direction: Tensor, eps: float) -> tuple[Tensor, ...]:
    """Logits, dot products with ``direction``, and 1/rms of every source: each [w, ...]."""
    dots, scales = [], []
    for source in sources:
        wide = source.to(direction.dtype)
        dots.append(wide @ direction)
        scales.append((wide.square().mean(-1) + eps).rsqrt())
    dots, scales = torch.stack(dots), torch.stack(scales)
    return dots * scales, dots, scales
