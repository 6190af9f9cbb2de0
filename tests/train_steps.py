"""Whole optimizer steps of the whole model on any layout, put together over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from torch import Tensor

from k3train.config import schema
from k3train.kernels.main_grad import add_in_products
from k3train.model.payload import schedule_config
from k3train.optim.build import build_optimizer
from k3train.parallel.groups import Groups, stop_groups
from k3train.router.update import update_biases
from tests import model_step, sharded
from tests.model_step import Micro
from tests.optimizer_step import optimizer_step
from tests.parity.test_model import randomise
from tests.ranks import run_ranks

ADAMW = schema.Optim(learning_rate=3e-3, eps=1e-2, clip_grad_norm=0.5)
"""AdamW's first steps are nearly the gradient's sign; a large epsilon keeps them a smooth function of it, so
that rounding of a gradient close to zero stays rounding."""
MUON = replace(ADAMW, optimizer=schema.Optimizer.muon, qk_clip=schema.QkClip(enabled=True, threshold=0.02))
"""Muon for matrices, AdamW for the rest, and a threshold so low that QK-Clip acts on most heads."""


@dataclass
class Trained:
    """What a few steps gave."""

    losses: list[float]
    """Mean over each step's loss tokens (the weighted MTP loss included)."""
    norms: list[float]
    """Gradient norm of each step before clipping."""
    gradients: dict[str, Tensor]
    """Of the first step's mean loss."""
    weights: dict[str, Tensor]
    """Before the first step."""
    balance: dict[int, dict[str, float]]
    """What the first step's routers saw, by layer number; without the new biases, which are rounded."""
    trained: dict[str, Tensor]
    """After the last step, selection biases included."""


def train(
    model: schema.Model,
    micros: Sequence[Micro],
    weights: dict[str, Tensor] | None = None,
    *,
    optim: schema.Optim = MUON,
    steps: int = 3,
    world: int | None = None,
    **degrees: Any,
) -> Trained:
    """Train as a run does: per-token loss, distributed optimizer, clipping, new selection biases.

    ``weights`` are one rank's; None draws them. Micro-batches are dealt to data-parallel ranks.
    """
    world = world or degrees.get("tp", 1) * degrees.get("pp", 1) * degrees.get("cp", 1)
    ranks = run_ranks(world, _train, model, list(micros), weights, degrees, optim, steps)
    assert all(r["norms"] == ranks[0]["norms"] for r in ranks)
    balance: dict[int, dict[str, float]] = {}
    for layer, numbers in (item for r in ranks for item in r["balance"].items()):
        assert balance.setdefault(layer, numbers) == numbers
    return Trained(
        losses=[sum(r["losses"][i] for r in ranks) for i in range(steps)],
        norms=ranks[0]["norms"],
        balance=balance,
        **{
            name: sharded.whole([s for r in ranks for s in r[name]])
            for name in ("gradients", "weights", "trained")
        },
    )


def _train(rank: int, model, micros, weights, degrees, optim, steps: int) -> dict[str, Any]:
    chunks, groups = model_step.build(model, degrees, randomise)
    if weights is not None:
        sharded.load(chunks, groups, weights)
    shared = schedule_config(chunks[0].config, groups.layout)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    wrapped = [
        DistributedDataParallel(shared, ddp, chunk, disable_bucketing=i > 0, pg_collection=groups.pg)
        for i, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        add_in_products(chunk)
    optimizer = build_optimizer(optim, wrapped, groups)
    shared.finalize_model_grads_func = finalize_model_grads
    shared.grad_scale_func = optimizer.scale_loss
    tokens = sum(int((micro.labels != -100).sum()) for micro in micros)
    result: dict[str, Any] = {"losses": [], "norms": [], "weights": _copied(chunks, groups)}
    for step in range(steps):
        for chunk in wrapped:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        result["losses"].append(model_step.run_schedule(wrapped, micros, groups) / tokens)
        if step == 0:
            _gather_gradients(wrapped)
            result["gradients"] = sharded.shards(chunks, groups, of_gradients=True)
        result["norms"].append(optimizer_step(optimizer).grad_norm)
        balance = update_biases(chunks, groups.tokens)
        if step == 0:
            for numbers in balance.values():
                del numbers["bias_range"], numbers["bias_drift"]
            result["balance"] = balance
    result["trained"] = _copied(chunks, groups)
    stop_groups()
    return result


def _copied(chunks, groups: Groups) -> list[sharded.Shard]:
    return [(key, shape, place, part.clone()) for key, shape, place, part in sharded.shards(chunks, groups)]


def _gather_gradients(wrapped) -> None:
    """The distributed optimizer leaves each data-parallel rank the sum of its slice alone; make it whole."""
    for chunk in wrapped:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            ranks = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                mine = bucket.grad_data.chunk(ranks.size())[ranks.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, mine, group=ranks)


def difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> tuple[float, str]:
    """Largest relative difference |got - want| / |want| (L2 norms) over tensors, and whose it is."""
    assert got.keys() == want.keys()
    each = {
        key: float((got[key].double() - value.double()).norm() / value.double().norm().clamp(min=1e-12))
        for key, value in want.items()
    }
    worst = max(each, key=lambda key: each[key])
    return each[worst], worst
