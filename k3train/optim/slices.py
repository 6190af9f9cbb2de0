"""This rank's part of the master weights, as megatron-core's distributed optimizer cuts them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from k3train.optim.offload import HostAdam


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements [start, stop) of the flattened shard of one parameter of this rank's model."""

    name: str
    """In the whole model."""
    param: Tensor
    """This rank's shard under tensor and expert parallelism."""
    start: int
    stop: int
    master: Tensor
    """fp32 [stop - start]: master weights, with the reduced gradient as their ``grad``."""


def master_slices(member: Any) -> dict[Any, Tensor]:
    """Master weights, fp32 and flat, of each parameter of which this rank holds a slice.

    HostAdam has them on the host.
    """
    if isinstance(member.optimizer, HostAdam):
        pairs = [
            *zip(member.model_fp32_groups, member.shard_fp32_groups, strict=True),
            *zip(member.model_float16_groups, member.shard_float16_groups, strict=True),
        ]
        masters = member.optimizer.masters
        return {p: masters[own] for params, owns in pairs for p, own in zip(params, owns, strict=True)}
    pairs = [
        *zip(member.model_fp32_groups, member.shard_fp32_groups, strict=True),
        *zip(member.model_float16_groups, member.shard_fp32_from_float16_groups, strict=True),
    ]
    return {p: own for params, owns in pairs for p, own in zip(params, owns, strict=True)}


def all_parameters(member: Any) -> list[Any]:
    """Every parameter of this rank's model that ``member`` updates, whoever holds its master weights."""
    return [p for buffer in member.buffers for bucket in buffer.buckets for p in bucket.params_list]


def slices_of(member: Any, names: dict[Any, str]) -> list[Slice]:
    """The slices that this rank holds, in the order of the buffers; ``names`` in the whole model."""
    masters = master_slices(member)
    found = []
    for param in all_parameters(member):
        if param in masters:
            span = member._get_model_param_range_map(param)["param"]
            found.append(Slice(names[param], param, span.start, span.end, masters[param]))
    return found
