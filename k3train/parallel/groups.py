"""The only place that makes process groups, and the only one that knows megatron-core's global state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from k3train.parallel.layout import RANK_ORDER, Layout

SEED_STRIDE = 8192
"""More than megatron-core's own offsets of a seed: 0 (data), 1,024 (experts), 2,718 + rank (tensors)."""


@dataclass(kw_only=True, slots=True)
class Groups:
    """Process groups of one layout, as this rank sees them."""

    layout: Layout
    pg: ProcessGroupCollection
    """megatron-core's collection: tp, pp, cp, dp, dp_cp, ep, expt_tp, expt_dp, mp, embd, ..."""
    tokens: Any
    """Ranks that see different tokens at the same layers: tp x cp x dp. Router histograms are summed here."""
    tp_rank: int
    pp_rank: int
    cp_rank: int
    dp_rank: int
    """Rank in the data-parallel group without context parallel."""
    ep_rank: int


def start_groups(layout: Layout, *, seed: int, timeout_seconds: int = 600) -> Groups:
    """Make every process group of ``layout`` and seed megatron-core's RNG tracker. Every rank must call this.

    The world must be started (``k3train.backend.start``) with ``layout.world`` ranks.
    """
    assert dist.get_world_size() == layout.world, (dist.get_world_size(), layout.world)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vp if layout.vp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        order=RANK_ORDER,
        distributed_timeout_minutes=math.ceil(timeout_seconds / 60),
        create_gloo_process_groups=False,
    )
    pg = ProcessGroupCollection.use_mpu_process_groups()
    seed_streams(
        layout,
        seed,
        tp_rank=pg.tp.rank(),
        pp_rank=pg.pp.rank(),
        ep_rank=pg.ep.rank(),
        etp_rank=pg.expt_tp.rank(),
    )
    return Groups(
        layout=layout,
        pg=pg,
        tokens=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        tp_rank=pg.tp.rank(),
        pp_rank=pg.pp.rank(),
        cp_rank=pg.cp.rank(),
        dp_rank=pg.dp.rank(),
        ep_rank=pg.ep.rank(),
    )


def seed_streams(
    layout: Layout, seed: int, *, tp_rank: int, pp_rank: int, ep_rank: int, etp_rank: int
) -> None:
    """Seed megatron-core's RNG tracker on the rank of these coordinates.

    No two streams of a layout have the same seed: pipeline ranks hold other layers, which must not start
    equal, and experts of one rank must not start as another's. megatron-core's own offset for experts,
    100 * ep rank + etp rank, meets that of tensor-parallel ranks. A generator of the CPU takes 32 bits of a
    seed, which is enough for pp * ep * etp = 524,288 ranks.
    """
    assert layout.tp <= SEED_STRIDE - 2718, layout.tp
    expert_rank = ep_rank * layout.etp + etp_rank
    tensor_parallel.model_parallel_cuda_manual_seed(
        seed + SEED_STRIDE * pp_rank,
        tp_rank=tp_rank,
        ep_rank=0,
        etp_rank=SEED_STRIDE * layout.pp * expert_rank,
        force_reset_rng=True,
    )


def stop_groups() -> None:
    """Destroy every process group but the world's. Every rank must call this.

    megatron-core only drops its references: each gloo group would keep three threads alive.
    """
    # A gloo group that nothing has used yet may still be connecting to a peer.
    dist.barrier()
    listed = parallel_state._global_process_group_list or []
    distinct = {id(group): group for group in listed if group is not None}
    parallel_state.destroy_model_parallel()
    for group in distinct.values():
        dist.destroy_process_group(group)
    parallel_state._global_process_group_list = None
