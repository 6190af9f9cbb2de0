"""The routed experts that live on this rank, as stacked matrices."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
)
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from k3train.kernels.grouped_gemm import grouped_mm, grouped_mms
from k3train.kernels.recompute import make_again
from k3train.kernels.situ import situ_glu
from k3train.model.config import K3Config


class Experts(MegatronModule):
    """SiTU-GLU feed-forwards in the latent width, one after another over rows sorted by expert.

    Sharded over ep along the expert axis and over expert-tensor parallelism along the inner width; replicated
    over expert data parallelism. ``selective``: activations are not kept for the backward pass.
    """

    gate: Tensor
    """[local experts, latent, ffn / etp]"""
    up: Tensor
    """[local experts, latent, ffn / etp]"""
    down: Tensor
    """[local experts, ffn / etp, latent]"""

    def __init__(self, config: K3Config, pg_collection: Any, *, selective: bool = False) -> None:
        super().__init__(config)
        moe, situ = config.k3.moe, config.k3.situ
        self.caps = situ.gate_cap, situ.up_cap
        self.selective = selective
        self.ep_group, self.tp_group = pg_collection.ep, pg_collection.expt_tp
        self.dp_group = pg_collection.expt_dp
        ep, etp = self.ep_group.size(), self.tp_group.size()
        if moe.num_experts % ep or moe.expert_ffn_size % etp:
            raise ValueError(
                f"parallel.ep={ep} must divide model.moe.num_experts={moe.num_experts}, and "
                f"parallel.etp={etp} must divide model.moe.expert_ffn_size={moe.expert_ffn_size}"
            )
        local, inner = moe.num_experts // ep, moe.expert_ffn_size // etp
        self.gate = _expert_parameter(config, (local, moe.latent_size, inner), split_dim=2)
        self.up = _expert_parameter(config, (local, moe.latent_size, inner), split_dim=2)
        self.down = _expert_parameter(config, (local, inner, moe.latent_size), split_dim=1)

    def forward(self, rows: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
        """Each row through its expert, times its weight.

        ``rows`` [t, latent], sorted by local expert; ``counts`` int64 [local experts], on any device, sums
        to t; ``weights`` [t]. Returns [t, latent]: with expert-tensor parallelism, this rank's part of a sum.
        """
        gate, up = grouped_mms(rows, [self.gate, self.up], counts)
        # The weight commutes with the down-projection; here it costs no pass over memory of its own.
        return make_again(
            lambda gate, up, weights: situ_glu(gate, up, *self.caps, weights),
            lambda inner: grouped_mm(inner, self.down, counts),
            gate,
            up,
            weights,
            on=self.selective,
        )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Global tensors [experts, ...], cut along experts over ep and along the inner width over etp."""
        ep = (self.ep_group.rank(), self.ep_group.size())
        etp = (self.tp_group.rank(), self.tp_group.size())
        before = len(sharded_offsets)

        def shard(name: str, split_dim: int) -> ShardedTensor:
            return ShardedTensor.from_rank_offsets(
                f"{prefix}{name}",
                getattr(self, name),
                *sharded_offsets,
                (before, *ep),
                (before + split_dim, *etp),
                replica_id=(0, 0, self.dp_group.rank()),
                prepend_axis_num=before,
            )

        return {
            f"{prefix}gate": shard("gate", 2),
            f"{prefix}up": shard("up", 2),
            f"{prefix}down": shard("down", 1),
        }


def _expert_parameter(config: K3Config, shape: tuple[int, ...], split_dim: int) -> nn.Parameter:
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    parameter = nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
    if config.perform_initialization:
        tracker = get_cuda_rng_tracker()
        assert tracker is not None
        assert config.init_method is not None
        with tracker.fork(get_expert_parallel_rng_tracker_name()):
            config.init_method(parameter)
    # Every rank holds a part of its own, so gradient norms count it on each ...
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=split_dim, stride=1)
    # ... and it is replicated over expert data parallelism, not over dp x cp. That is said on every layout,
    # even where the two groups are equal: so the optimizer has the same parts whatever ep is.
    parameter.allreduce = False  # pyright: ignore[reportAttributeAccessIssue]
    return parameter
