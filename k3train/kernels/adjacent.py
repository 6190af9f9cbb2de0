"""Tensors that lie side by side in memory, taken as one: one matrix product in the place of several.

megatron-core's gradient buffers hold a module's weights one after another, so projections of one input are
one matrix without a copy and without a parameter of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def joined(parts: Sequence[Tensor], dim: int) -> Tensor | None:
    """``parts``, of equal strides, as one view along ``dim``, in their order; None if they lie otherwise."""
    first = parts[0]
    if len(parts) == 1:
        return first
    place, length, storage = first.data_ptr(), 0, first.untyped_storage().data_ptr()
    for part in parts:
        beside = part.data_ptr() == place and part.untyped_storage().data_ptr() == storage
        if not beside or part.stride() != first.stride() or part.dtype is not first.dtype:
            return None
        place += part.shape[dim] * part.stride(dim) * part.element_size()
        length += part.shape[dim]
    shape = list(first.shape)
    shape[dim] = length
    whole = first.as_strided(shape, first.stride())
    return whole if _fit(parts, whole, dim) else None


def _fit(parts: Sequence[Tensor], whole: Tensor, dim: int) -> bool:
    """Whether the parts differ along ``dim`` alone, and the whole does not overlap itself."""
    dim %= whole.dim()
    sizes = {tuple(n for i, n in enumerate(part.shape) if i != dim) for part in parts}
    reach = whole.stride(dim) * whole.shape[dim]
    return len(sizes) == 1 and all(whole.stride(i) >= reach or whole.shape[i] == 1 for i in range(dim))


def runs(parts: Sequence[Tensor], dim: int) -> list[list[int]]:
    """Indices of ``parts`` in groups that ``joined`` takes as one, each group in the order of memory.

    The order of the groups does not depend on where they lie, since it decides how sums are rounded.
    """
    found: list[list[int]] = []
    for i in sorted(range(len(parts)), key=lambda i: parts[i].data_ptr()):
        if found and joined([parts[found[-1][-1]], parts[i]], dim) is not None:
            found[-1].append(i)
        else:
            found.append([i])
    return sorted(found, key=min)


def empty_beside(parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """New tensors like ``parts`` [..., c], side by side along their last axis if ``parts`` are, in the same
    order."""
    order = runs(parts, -1)
    if len(order) > 1:
        return tuple(torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in parts)
    sizes = [parts[i].shape[-1] for i in order[0]]
    whole = torch.empty(*parts[0].shape[:-1], sum(sizes), dtype=parts[0].dtype, device=parts[0].device)
    pieces = dict(zip(order[0], whole.split(sizes, -1), strict=True))
    return tuple(pieces[i] for i in range(len(parts)))
