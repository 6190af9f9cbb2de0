"""The values of one tensor, from k3train's form to the release's and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from k3train.checkpoint.hf.names import Entry, Form
from k3train.checkpoint.manifest import CheckpointError


def to_release(entry: Entry, ours: Tensor, index: int) -> Tensor:
    """Tensor ``entry.names[index]`` of the release, [``entry.stored``], from the whole tensor ``ours``."""
    match entry.form:
        case Form.experts:
            return ours[index].T
        case Form.padded:
            return torch.nn.functional.pad(ours, (0, entry.stored[0] - ours.shape[0]))
        case Form.halves:
            return _swapped(ours)
        case Form.same | Form.row | Form.taps | Form.bounds:
            return ours.reshape(entry.stored)


def from_release(entry: Entry, theirs: Sequence[Tensor]) -> Tensor:
    """Rows of ``entry.ours`` for the tensors ``theirs``: consecutive experts, or all there is.

    Raises CheckpointError when what should be zero padding is not.
    """
    match entry.form:
        case Form.experts:
            return torch.stack([matrix.T for matrix in theirs])
        case Form.padded:
            flat, heads = theirs[0].reshape(-1), entry.shape[0]
            if flat[heads:].any():
                raise CheckpointError(
                    f"{entry.name}: values {heads} to {len(flat) - 1} must be zero padding, because the "
                    f"model has {heads} heads"
                )
            return flat[:heads]
        case Form.halves:
            return _swapped(theirs[0])
        case Form.bounds:
            bias = theirs[0].float()
            return torch.stack([bias.min() - 1, bias.max() + 1])
        case Form.same | Form.row | Form.taps:
            return theirs[0].reshape(entry.shape)


def _swapped(matrix: Tensor) -> Tensor:
    left, right = matrix.chunk(2, dim=1)
    return torch.cat([right, left], dim=1)


def check_finite(name: str, value: Tensor) -> Tensor:
    """``value`` itself. Raises CheckpointError when it holds NaN or infinity."""
    if value.numel() and not torch.stack(torch.aminmax(value)).isfinite().all():
        raise CheckpointError(f"{name} holds NaN or infinity: nothing can be trained from it or told with it")
    return value
