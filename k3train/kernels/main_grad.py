"""Weight gradients that the product which makes them adds into megatron-core's fp32 buffers.

Otherwise each gradient is written in bf16, read again and added. megatron-core has an option for that,
``gradient_accumulation_fusion``, which needs a kernel of apex; cuBLAS does the same through torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from k3train.backend.derivative import once_differentiable
from k3train.kernels.adjacent import joined


def add_in_products(model: nn.Module) -> None:
    """Let megatron-core's linears add their weight gradients to ``main_grad``, which every parameter of
    ``model`` must have by now: it is wrapped in megatron-core's DistributedDataParallel."""
    from megatron.core.tensor_parallel import layers

    if not layers._grad_accum_fusion_available:

        def add(x: Tensor, grad: Tensor, total: Tensor) -> None:
            add_product(total, grad.t(), x)

        layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
            wgrad_gemm_accum_fp32=add, wgrad_gemm_accum_fp16=add
        )
    linears: list[Any] = [m for m in model.modules() if hasattr(m, "gradient_accumulation_fusion")]
    for module in linears:
        module.gradient_accumulation_fusion = True


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b; bf16 products on a GPU are added in fp32 without a rounding in between."""
    if a.is_cuda and a.dtype is torch.bfloat16:
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    else:
        total += a @ b


def weight_gradients(weights: Sequence[Tensor], grad: Tensor, x: Tensor) -> list[Tensor]:
    """Gradients of weights [m_i, k] of one input x [n, k]; ``grad`` [n, sum of m_i], in their order.

    Those of weights with a ``main_grad`` are added to it; what is returned for them has only a shape. All
    uses of such a weight must go this way.
    """
    mains = [main_grad(weight) for weight in weights]
    whole = None if any(main is None for main in mains) else joined(mains, 0)  # pyright: ignore
    if whole is not None:
        add_product(whole, grad.t(), x)
        return [added(weight) for weight in weights]
    out = []
    pieces = grad.split([weight.shape[0] for weight in weights], -1)
    for weight, main, piece in zip(weights, mains, pieces, strict=True):
        if main is None:
            out.append(piece.t() @ x)
        else:
            add_product(main, piece.t(), x)
            out.append(added(weight))
    return out


def part_of(weight: Tensor, dim: int, first: int, size: int) -> Tensor:
    """Rows (``dim`` 0) or columns (1) of a parameter, [first, first + size); its gradient is added to that
    part of ``main_grad``, if it has one. All uses of such a parameter must go this way."""
    return _Part.apply(weight, dim, first, size)  # pyright: ignore[reportReturnType]


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, dim: int, first: int, size: int) -> Tensor:
        ctx.weight, ctx.place = weight, (dim, first, size)
        return weight.narrow(dim, first, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        main = main_grad(ctx.weight)
        total = torch.zeros_like(ctx.weight) if main is None else main
        total.narrow(*ctx.place).add_(grad)
        return total if main is None else added(ctx.weight), None, None, None


def main_grad(weight: Any) -> Tensor | None:
    """Where gradients of ``weight`` are summed up; None outside DistributedDataParallel."""
    return getattr(weight, "main_grad", None)


def added(weight: Any) -> Tensor:
    """Note that the gradient of ``weight`` is in its ``main_grad``; something to give autograd in its place,
    which must see a gradient for megatron-core to know that this parameter is done."""
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)
