"""Tensors that stay fp32 while a wrapper casts the rest of a model."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def never_narrower(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``fn`` of ``nn.Module._apply`` without casts to narrower floats; devices change as asked.

    megatron-core's wrappers for bf16 and fp16 cast whole models, whatever a module made its tensors for.
    """

    def move(tensor: Tensor) -> Tensor:
        moved = fn(tensor)
        if moved.is_floating_point() and moved.dtype.itemsize < tensor.dtype.itemsize:
            return tensor.to(moved.device)
        return moved

    return move
