"""One training step of the whole model on any layout, for comparing layouts with one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from k3train.config import schema
from k3train.kernels.packing import Packing, make_packing
from k3train.model.build import build_model
from k3train.model.config import make_config
from k3train.model.payload import schedule_config
from k3train.parallel.groups import Groups, start_groups, stop_groups
from k3train.parallel.layout import make_layout
from tests import sharded
from tests.ranks import run_ranks


@dataclass
class Micro:
    """One packed micro-batch of the whole buffer: int [n] each."""

    tokens: Tensor
    labels: Tensor
    labels_mtp: Tensor
    borders: tuple[int, ...]
    valid: Tensor


def make_micro(borders: tuple[int, ...], vocab: int, seed: int, padding: bool = True) -> Micro:
    """Random tokens; the last segment is padding unless told otherwise."""
    n = borders[-1]
    tokens = torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(seed))
    valid = torch.ones(n, dtype=torch.bool)
    if padding:
        valid[borders[-2] :] = False
    labels = tokens.roll(-1)
    labels_mtp = tokens.roll(-2)
    for border in borders[1:]:
        labels[border - 1] = -100
        labels_mtp[max(border - 2, 0) : border] = -100
    labels[~valid] = labels_mtp[~valid] = -100
    return Micro(tokens, labels, labels_mtp, borders, valid)


@dataclass
class Step:
    """What one step gave, put together over ranks."""

    loss: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def step(
    model: schema.Model,
    micros: list[Micro],
    weights: dict[str, Tensor] | None = None,
    world: int | None = None,
    prepare: Callable[[Any], None] | None = None,
    **degrees: Any,
) -> Step:
    """Loss (sum over tokens) and its gradients after one step of the pipeline schedule on real ranks.

    ``weights`` are one rank's; None keeps the initial ones. Micro-batches are dealt to data-parallel ranks.
    """
    if world is None:
        world = degrees.get("tp", 1) * degrees.get("pp", 1) * degrees.get("cp", 1)
    results = run_ranks(world, _step, model, micros, weights, degrees, prepare)
    return Step(
        loss=sum(r["loss"] for r in results),
        gradients=sharded.whole([s for r in results for s in r["gradients"]]),
        weights=sharded.whole([s for r in results for s in r["weights"]]),
    )


def build(model: schema.Model, degrees: dict[str, Any], prepare: Callable[[Any], None] | None):
    """Groups and this rank's chunks; call it on a rank."""
    parallel = schema.Parallel(**degrees)
    layout = make_layout(model, parallel, dist.get_world_size())
    groups = start_groups(layout, seed=7)
    config = make_config(model, parallel, layout)
    chunks = build_model(model, config, layout, groups, torch.device("cpu"))
    for chunk in chunks if prepare is not None else []:
        prepare(chunk)
    return chunks, groups


def packing(micro: Micro, groups: Groups) -> Packing:
    """The share of this rank's context-parallel place."""
    return make_packing(micro.borders, micro.valid, rank=groups.cp_rank, size=groups.layout.cp)


def _step(rank: int, model, micros, weights, degrees, prepare) -> dict[str, Any]:
    chunks, groups = build(model, degrees, prepare)
    if weights is not None:
        sharded.load(chunks, groups, weights)
    held = sharded.shards(chunks, groups)
    held = [(key, shape, offset, part.clone()) for key, shape, offset, part in held]
    loss = train_step(chunks, micros, groups)
    result = {"loss": loss, "gradients": sharded.shards(chunks, groups, of_gradients=True), "weights": held}
    stop_groups()
    return result


def train_step(chunks, micros: list[Micro], groups: Groups) -> float:
    """Run the schedule with DistributedDataParallel; returns this rank's part of the summed loss."""
    wrapped = wrap(chunks, groups)
    wrapped[0].config.finalize_model_grads_func = _without_division
    return run_schedule(wrapped, micros, groups)


def wrap(chunks, groups: Groups) -> list[Any]:
    """The chunks as the pipeline schedules take them."""
    shared = schedule_config(chunks[0].config, groups.layout)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
    return [
        DistributedDataParallel(shared, ddp, chunk, disable_bucketing=i > 0, pg_collection=groups.pg)
        for i, chunk in enumerate(chunks)
    ]


def run_schedule(wrapped, micros: list[Micro], groups: Groups, *, forward_only: bool = False) -> float:
    """Forward and backward of all of a step's micro-batches, or the forward passes of an evaluation, without
    MTP; returns this rank's part of the summed loss."""
    layout = groups.layout
    mine = micros[groups.dp_rank :: layout.dp]
    n = mine[0].borders[-1]

    def forward(iterator, chunk):
        micro = next(iterator)
        place = packing(micro, groups)
        part = slice(place.start, place.stop)
        out = chunk(
            micro.tokens[None, part],
            place,
            labels=micro.labels[None, part],
            labels_mtp=None if forward_only else micro.labels_mtp[None, part],
        )

        def loss_function(losses: Tensor):
            count = (micro.labels[part] != -100).sum().int()
            return losses.sum(), count, {"loss": losses.sum().detach()}

        return out, loss_function

    iterators = [iter(mine) for _ in wrapped]
    run = get_forward_backward_func()
    reports = run(
        forward_step_func=forward,
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=wrapped if len(wrapped) > 1 else wrapped[0],
        num_microbatches=len(mine),
        seq_length=n,
        micro_batch_size=1,
        forward_only=forward_only,
    )
    share = sum(float(r["loss"]) for r in reports)
    return share / layout.tp if wrapped[-1].module.post_process else 0.0


def _without_division(chunks, num_tokens=None, **kwargs) -> None:
    """Reduce gradients as in training but leave the sum over tokens, which is the same on every layout."""
    finalize_model_grads(chunks, num_tokens=None, **kwargs)
