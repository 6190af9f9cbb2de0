"""Everything that one stage trains with: groups, model, optimizer and data, built in this order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)

from k3train.config.merge import stage_model, world_size
from k3train.config.schema import Run
from k3train.curriculum.stages import StagePlan
from k3train.data.batch import MicroBatch
from k3train.data.open import StageData, open_data
from k3train.data.prefetch import Prefetch
from k3train.faults import point
from k3train.kernels.main_grad import add_in_products
from k3train.model.build import build_model
from k3train.model.config import K3Config, make_config
from k3train.model.layer import K3Layer
from k3train.model.payload import schedule_config
from k3train.optim.build import build_optimizer, members
from k3train.optim.offload import HostAdam
from k3train.parallel.groups import Groups, start_groups, stop_groups
from k3train.parallel.layout import make_layout
from k3train.plan.split import resolved_parallel
from k3train.router.update import RouterUpdate, start_update
from k3train.train.progress import Progress


@dataclass(kw_only=True, slots=True)
class StageSetup:
    """What a stage is trained with, on this rank."""

    run: Run
    table: list[StagePlan]
    """Every stage of the run."""
    plan: StagePlan
    """This stage."""
    device: torch.device
    groups: Groups
    config: K3Config
    chunks: list[Any]
    """This rank's model chunks, each wrapped in megatron-core's DistributedDataParallel."""
    optimizer: Any
    data: StageData
    batches: Prefetch[list[MicroBatch]]
    """This rank's micro-batches, step after step."""
    routers: RouterUpdate = field(default_factory=lambda: start_update([]))
    """What routers counted in the last forward and backward pass, until it is used or discarded."""
    resting: Any = None
    """Fingerprint of this rank's state at the end of the last step, when the next one compares it."""


def build_stage(
    run: Run,
    table: list[StagePlan],
    plan: StagePlan,
    progress: Progress,
    device: torch.device,
    bookmark: dict[str, Any] | None = None,
) -> StageSetup:
    """Build one stage of ``run`` in its own parallel layout, with data from ``progress`` on; the ``bookmark``
    of the checkpoint that this progress was read from makes that quick. Every rank must call this.

    Weights are initialised from the run's seed; ``k3train.checkpoint`` replaces them when there is something
    to load.
    """
    parallel = resolved_parallel(run, plan.stage)
    layout = make_layout(run.model, parallel, world_size(run))
    groups = start_groups(layout, seed=run.seed, timeout_seconds=run.cluster.collective_timeout_seconds)
    model = stage_model(run.model, plan.stage)
    config = make_config(model, parallel, layout)
    modules = build_model(model, config, layout, groups, device)
    scheduled = schedule_config(config, layout)
    chunks = [_wrap(module, index, scheduled, groups, device) for index, module in enumerate(modules)]
    optimizer = build_optimizer(run.optim, chunks, groups)
    scheduled.grad_scale_func = optimizer.scale_loss
    data = open_data(run, table, plan, bookmark)
    first_step = plan.steps_done(progress.tokens)
    setup = StageSetup(
        run=run,
        table=table,
        plan=plan,
        device=device,
        groups=groups,
        config=config,
        chunks=chunks,
        optimizer=optimizer,
        data=data,
        batches=data.steps(first_step, dp_rank=groups.dp_rank, dp_size=layout.dp),
    )
    scheduled.finalize_model_grads_func = partial(_finish_gradients, setup)
    return setup


def _finish_gradients(setup: StageSetup, chunks: list[Any], num_tokens: Any, **options: Any) -> None:
    """megatron-core's reduction over data-parallel ranks and of shared parameters, after the last backward.

    Gradients stay sums over tokens: the optimizer divides by their number as it reads them, which saves a
    pass. What routers counted travels beside the end of it, the norm and the optimizer.
    """
    setup.routers = start_update(setup.chunks, setup.groups.tokens)
    point("step.backward", tensors=lambda: gradients(chunks))
    finalize_model_grads(chunks, None, **options)


def gradients(chunks: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter's main gradient on this rank, by the parameter's name."""
    for chunk in chunks:
        for name, parameter in chunk.module.named_parameters():
            yield name, parameter.main_grad


def weights(chunks: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter of this rank, by name."""
    for chunk in chunks:
        yield from chunk.module.named_parameters()


def moments(optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's fp32 master slices (``master``) and AdamW's moments of them, flat."""
    for member in members(optimizer):
        for master, state in member.optimizer.state.items():
            yield "master", master
            yield from ((key, value) for key, value in state.items() if isinstance(value, torch.Tensor))


def _wrap(
    module: torch.nn.Module, index: int, config: K3Config, groups: Groups, device: torch.device
) -> DistributedDataParallel:
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        # Overlap has nothing to overlap with on the CPU, nor on one rank.
        overlap_grad_reduce=device.type == "cuda" and groups.layout.pp == 1 and groups.layout.world > 1,
    )
    # Only the first chunk's gradients are reduced in buckets while backward still runs.
    chunk = DistributedDataParallel(
        config, settings, module, disable_bucketing=index > 0, pg_collection=groups.pg
    )
    add_in_products(chunk)
    return chunk


def close_stage(setup: StageSetup) -> None:
    """Free what ``build_stage`` made, so that the next stage can build its own. Every rank must call this.

    Hooks of megatron-core's DistributedDataParallel keep the parameters alive in cycles that Python's
    collector cannot see, so their memory is given back here.
    """
    setup.batches.close()
    setup.data.close()
    for layer in (module for chunk in setup.chunks for module in chunk.modules()):
        if isinstance(layer, K3Layer):
            layer.begun.recordings.clear()
            layer.fed.recordings.clear()
    for _, tensor in (*gradients(setup.chunks), *weights(setup.chunks), *moments(setup.optimizer)):
        tensor.untyped_storage().resize_(0)
    for member in members(setup.optimizer):
        if isinstance(member.optimizer, HostAdam):
            member.optimizer.close()
    setup.chunks.clear()
    setup.optimizer = None
    stop_groups()
    if setup.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.synchronize()  # copies that still read or write such blocks
        torch._C._host_emptyCache()  # a longer stage has no use for pinned blocks of this one's size
