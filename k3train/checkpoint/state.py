"""Model and optimizer as megatron-core's sharded state: every tensor under its global name and place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica

from k3train.optim.build import members, moment_names
from k3train.optim.slices import all_parameters, master_slices
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


def optimizer_state(optimizer: Any, model: dict[str, Any], *, loading: bool) -> dict[int, dict[str, Any]]:
    """Where the fp32 master weights and moments of each parameter belong: sharded tensors without data.

    Keys are ``optimizer.state.<param or moment>.<name of the parameter>``, shapes those of the
    parameters, so any layout loads them and nothing depends on how parameters are divided between buffers or
    optimizers (megatron-core has two of those with expert parallel). For ``loading`` they are those of which
    this rank holds a slice. ``model`` is the result of ``model_state``.

    megatron-core's own ``fully_reshardable`` state is not used: it takes one parameter's values for another's
    when buckets are padded or a parameter group holds two dtypes.
    """
    places = {leaf.data: leaf for leaf in nested_values(model)}
    held = {param for member in members(optimizer) for param in master_slices(member)}
    return {
        i: {key: _place(places[param], key) for key in _keys(member, param)}
        for i, (member, param) in enumerate(_parameters(optimizer))
        if param in held or not loading
    }


@torch.no_grad()
def fetch_optimizer_state(optimizer: Any, state: dict[int, dict[str, Any]]) -> None:
    """Give each tensor of ``state`` that this rank writes, the main replica, its data, whole and on the host.

    ``state`` is the result of ``optimizer_state``. Every bucket is gathered on its device within its
    data-parallel group, so every rank must call this.
    """
    places = _by_parameter(optimizer, state)
    for member in members(optimizer):
        slices = master_slices(member)
        for index, buffer in enumerate(member.buffers):
            (ranges,) = member.gbuf_ranges[index].values()
            for bucket, bucket_ranges in zip(buffer.buckets, ranges, strict=True):
                _fetch_bucket(member, buffer, bucket, bucket_ranges, slices, places)


@torch.no_grad()
def put_optimizer_state(optimizer: Any, loaded: dict[int, dict[str, Any]]) -> None:
    """Copy loaded tensors into this rank's slices of master weights and moments."""
    values = _by_parameter(optimizer, loaded)
    for member in members(optimizer):
        for param, master in master_slices(member).items():
            span = member._get_model_param_range_map(param)["param"]
            for key, own in _values(member, param, master).items():
                own.copy_(values[param][key].reshape(-1)[span.start : span.end])


def _parameters(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """Each parameter of this rank's model after the optimizer that updates it, always in the same order."""
    return ((member, param) for member in members(optimizer) for param in all_parameters(member))


def _by_parameter(optimizer: Any, state: dict[int, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    return {param: state[i] for i, (_, param) in enumerate(_parameters(optimizer)) if i in state}


def _fetch_bucket(
    member: Any,
    buffer: Any,
    bucket: Any,
    ranges: dict[str, Any],
    slices: dict[Any, torch.Tensor],
    places: dict[Any, dict[str, Any]],
) -> None:
    """Fetch what this rank writes of a bucket's parameters: see ``fetch_optimizer_state``."""
    group = member.data_parallel_group
    whole = torch.empty(bucket.grad_data.numel(), device=bucket.grad_data.device)
    local = whole.new_empty(whole.numel() // group.size())
    for key in dict.fromkeys(key for param in bucket.params_list for key in places[param]):
        for param, place in ranges["param_map"].items():
            if key in places[param]:
                span = place["gbuf_local"]
                local[span.start : span.end].copy_(_values(member, param, slices[param])[key])
        dist.all_gather_into_tensor(whole, local, group=group)
        for param in bucket.params_list:
            if key in places[param] and is_main_replica(places[param][key].replica_id):
                start = buffer.param_index_map[param][0] - bucket.offset
                own = whole[start : start + param.numel()].view(param.shape)
                places[param][key].data = own.to("cpu", copy=True)


def _keys(member: Any, param: Any) -> tuple[str, ...]:
    """What is saved of a parameter besides itself: its master weights and moments."""
    return ("param", *moment_names(member, param))


def _values(member: Any, param: Any, master: torch.Tensor) -> dict[str, torch.Tensor]:
    moments = member.optimizer.state[master]
    return {"param": master, **{key: moments[key] for key in moment_names(member, param)}}


def _place(parameter: ShardedTensor, key: str) -> ShardedTensor:
    """The sharding of a parameter for an fp32 tensor of its shape."""
    return replace(parameter, key=f"optimizer.state.{key}.{parameter.key}", data=None, dtype=torch.float32)


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
