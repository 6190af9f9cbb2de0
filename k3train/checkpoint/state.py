"""Model and optimizer as megatron-core's sharded state: every tensor under its global name and place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject

from k3train.optim.build import members
from k3train.parallel.groups import Groups

_OPTIMIZER_FORMAT = "fully_reshardable"
"""Moments and master weights are stored as whole parameters, so any layout loads them."""


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


def optimizer_state(
    optimizer: Any, model: dict[str, Any], groups: Groups, *, loading: bool
) -> dict[int, dict[int, Any]]:
    """Sharded fp32 master weights and moments, by position in the chain; every rank must call this.

    Keys are ``optimizer.state.<param|exp_avg|exp_avg_sq>.<name of the parameter>``. Nothing depends on how
    parameters are divided between the chain's members (megatron-core has two of them with expert parallel,
    one without). When ``loading`` the tensors are places to load into. Saving gathers each buffer within the
    data-parallel group on the host.
    """
    metadata = _metadata(groups)
    return {
        i: each.sharded_param_state_fully_reshardable(model, is_loading=loading, metadata=metadata)
        for i, each in enumerate(members(optimizer))
    }


@torch.no_grad()
def put_optimizer_state(optimizer: Any, loaded: dict[int, dict[int, Any]]) -> None:
    """Copy loaded tensors into this rank's slices of master weights and moments."""
    for i, each in enumerate(members(optimizer)):
        each.load_parameter_state_from_fully_reshardable(loaded[i])


def layout_identity(groups: Groups) -> dict[str, Any]:
    """What must agree for a rank to continue its own random streams."""
    return {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(groups.layout).items()}


def _metadata(groups: Groups) -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": _OPTIMIZER_FORMAT,
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
