"""Model and optimizer as megatron-core's sharded state: every tensor under its global name and place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from k3train.optim.build import members, moment_names
from k3train.optim.slices import master_slices
from k3train.parallel.groups import Groups


def unwrap(chunk: Any) -> Any:
    """The model inside DistributedDataParallel and precision wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def model_state(chunks: Sequence[Any], groups: Groups) -> dict[str, Any]:
    """Sharded tensors of parameters and buffers, one entry a local chunk.

    megatron-core layers also register empty byte objects (``_extra_state``) for Transformer Engine; they are
    left out.
    """
    metadata = _metadata(groups)
    states = {
        f"model{i}": unwrap(chunk).sharded_state_dict(metadata=metadata) for i, chunk in enumerate(chunks)
    }
    return _without_objects(states)


@torch.no_grad()
def optimizer_state(
    optimizer: Any, model: dict[str, Any], groups: Groups, *, loading: bool
) -> dict[int, dict[str, Any]]:
    """Sharded fp32 master weights and moments of each parameter; every rank must call this.

    Keys are ``optimizer.state.<param or moment>.<name of the parameter>``, shapes those of the
    parameters, so any layout loads them and nothing depends on how parameters are divided between buffers or
    optimizers (megatron-core has two of those with expert parallel). For saving, every bucket is gathered
    within its data-parallel group, on the host; for ``loading`` there are places to load into, for those
    parameters of which this rank holds a slice. ``model`` is the result of ``model_state``.

    megatron-core's own ``fully_reshardable`` state is not used: it takes one parameter's values for another's
    when buckets are padded or a parameter group holds two dtypes.
    """
    places = {leaf.data: leaf for leaf in nested_values(model)}
    state = {}
    for i, (param, values) in enumerate(_whole_values(optimizer, loading=loading)):
        if values is not None:
            state[i] = {key: _like(places[param], key, value) for key, value in values.items()}
    return state


@torch.no_grad()
def put_optimizer_state(optimizer: Any, loaded: dict[int, dict[str, Any]]) -> None:
    """Copy loaded tensors into this rank's slices of master weights and moments."""
    order = {param: i for i, (param, _) in enumerate(_whole_values(optimizer, loading=True))}
    for member in members(optimizer):
        for param, master in master_slices(member).items():
            span = member._get_model_param_range_map(param)["param"]
            for key, own in _values(member, param, master).items():
                own.copy_(loaded[order[param]][key].reshape(-1)[span.start : span.end])


def _whole_values(optimizer: Any, *, loading: bool) -> Iterator[tuple[Any, dict[str, torch.Tensor] | None]]:
    """Each parameter of this rank's model, always in the same order, with its whole values on the host.

    Loading gives empty tensors, and None for a parameter of which this rank holds no slice.
    """
    for member in members(optimizer):
        slices = master_slices(member)
        for index, buffer in enumerate(member.buffers):
            (ranges,) = member.gbuf_ranges[index].values()
            for bucket, bucket_ranges in zip(buffer.buckets, ranges, strict=True):
                gathered = None if loading else _gather_bucket(member, buffer, bucket, bucket_ranges, slices)
                for param in bucket.params_list:
                    if gathered is None:
                        empty = {
                            key: torch.empty(param.shape, dtype=torch.float32, device="cpu")
                            for key in _keys(member, param)
                        }
                        yield param, empty if param in slices else None
                    else:
                        yield param, gathered[param]


def _gather_bucket(
    member: Any, buffer: Any, bucket: Any, ranges: dict[str, Any], slices: dict[Any, torch.Tensor]
) -> dict[Any, dict[str, torch.Tensor]]:
    """The master weights and moments of each parameter of a bucket, whole and on the host, from all ranks of
    its data-parallel group.

    Each is copied on its own: a moment that only some parameters have would take the host's memory for all.
    """
    group = member.data_parallel_group
    whole: dict[Any, dict[str, torch.Tensor]] = {param: {} for param in bucket.params_list}
    for key in dict.fromkeys(key for param in bucket.params_list for key in _keys(member, param)):
        local = torch.zeros(bucket.grad_data.numel() // group.size(), device=bucket.grad_data.device)
        for param, place in ranges["param_map"].items():
            if key in _keys(member, param):
                span = place["gbuf_local"]
                local[span.start : span.end].copy_(_values(member, param, slices[param])[key])
        out = local.new_empty(bucket.grad_data.numel())
        dist.all_gather_into_tensor(out, local, group=group)
        for param in bucket.params_list:
            if key in _keys(member, param):
                start = buffer.param_index_map[param][0] - bucket.offset
                own = out[start : start + param.numel()].view(param.shape)
                whole[param][key] = own.to("cpu", copy=True)
    return whole


def _keys(member: Any, param: Any) -> tuple[str, ...]:
    """What is saved of a parameter besides itself: its master weights and moments."""
    return ("param", *moment_names(member, param))


def _values(member: Any, param: Any, master: torch.Tensor) -> dict[str, torch.Tensor]:
    moments = member.optimizer.state[master]
    return {"param": master, **{key: moments[key] for key in moment_names(member, param)}}


def _like(place: Any, key: str, value: torch.Tensor) -> Any:
    """The sharding of a parameter for a tensor of its shape."""
    changed: dict[str, Any] = {"key": f"optimizer.state.{key}.{place.key}", "data": value}
    if isinstance(place, ShardedTensor):
        changed["dtype"] = value.dtype
    return replace(place, **changed)


def layout_identity(groups: Groups) -> dict[str, Any]:
    """What must agree for a rank to continue its own random streams."""
    return {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(groups.layout).items()}


def _metadata(groups: Groups) -> dict[str, Any]:
    return {
        "dp_cp_group": groups.pg.dp_cp,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }


def _without_objects(state: dict[str, Any]) -> dict[str, Any]:
    kept = {}
    for key, value in state.items():
        if isinstance(value, dict):
            kept[key] = _without_objects(value)
        elif not isinstance(value, ShardedObject):
            kept[key] = value
    return kept
