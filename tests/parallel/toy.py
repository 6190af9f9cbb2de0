"""A small model with every kind of parameter placement, and values that do not depend on the layout.

Values and gradients are functions of a tensor's global name: each rank draws the whole tensor and cuts out
its part, so two layouts hold the same model and a comparison between them may be bitwise.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from k3train.checkpoint.state import fetch_optimizer_state, model_state, optimizer_state
from k3train.config.schema import Model, Optim, Parallel, Precision
from k3train.model.config import make_config
from k3train.optim.build import allocate_state, build_optimizer, reload_master_weights
from k3train.parallel.groups import Groups, start_groups
from k3train.parallel.layout import chunk_layers, make_layout
from tests.optimizer_step import optimizer_step

HIDDEN, HEADS, EXPERTS = 8, 4, 4


class ToyLayer(MegatronModule):
    """Sharded and replicated matrices, fp32 vectors, matrix and convolution, experts, a buffer."""

    def __init__(self, config: Any, layer: int, groups: Groups) -> None:
        super().__init__(config)
        self.layer, self.groups = layer, groups
        args: dict[str, Any] = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "skip_bias_add": False,
            "tp_group": groups.pg.tp,
        }
        self.up = ColumnParallelLinear(HIDDEN, 2 * HIDDEN, gather_output=False, **args)
        self.down = RowParallelLinear(2 * HIDDEN, HIDDEN, input_is_parallel=True, **args)
        heads = HEADS // groups.layout.tp
        device = torch.cuda.current_device()
        self.norm_weight = torch.nn.Parameter(torch.ones(HIDDEN, device=device))
        # The first parameter is bf16: fp32 and bf16 parameters then alternate in groups and buffers.
        self.latent = torch.nn.Parameter(torch.zeros(HIDDEN, 5, dtype=config.params_dtype, device=device))
        self.router_weight = torch.nn.Parameter(torch.zeros(EXPERTS, HIDDEN, device=device))
        self.A_log = torch.nn.Parameter(torch.zeros(heads, device=device))
        self.conv_weight = torch.nn.Parameter(torch.zeros(heads, 3, device=device))
        self.A_log.tensor_model_parallel = self.conv_weight.tensor_model_parallel = True  # type: ignore
        local = EXPERTS // groups.layout.ep
        first = groups.ep_rank * local
        self.experts = torch.nn.ParameterDict(
            {
                str(first + i): torch.nn.Parameter(
                    torch.zeros(HIDDEN, 2, dtype=config.params_dtype, device=device)
                )
                for i in range(local)
            }
        )
        for expert in self.experts.values():
            expert.allreduce = groups.layout.ep == 1
        self.register_buffer("expert_bias", torch.zeros(EXPERTS, device=device))

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> Any:
        pg = self.groups.pg
        own = {
            name: value
            for name, value in self.state_dict(keep_vars=True).items()
            if not name.startswith(("up.", "down.", "experts."))
        }
        state = make_sharded_tensors_for_checkpoint(
            own, prefix, {"A_log": 0, "conv_weight": 0}, sharded_offsets, tp_group=pg.tp, dp_cp_group=pg.dp_cp
        )
        for child in ("up", "down"):
            state.update(
                getattr(self, child).sharded_state_dict(f"{prefix}{child}.", sharded_offsets, metadata)
            )
        for name, value in self.experts.items():
            state[f"{prefix}experts.{name}"] = ShardedTensor.from_rank_offsets(
                f"{prefix}experts.all",
                value,
                (0, int(name), EXPERTS),
                prepend_axis_num=1,
                replica_id=(0, 0, pg.expt_dp.rank())
                if self.groups.layout.ep > 1
                else (pg.tp.rank(), 0, pg.dp_cp.rank()),
            )
        return state


class ToyModel(MegatronModule):
    """Layers of one pipeline chunk, named by their place in the whole model."""

    def __init__(self, config: Any, layers: range, groups: Groups) -> None:
        super().__init__(config)
        self.layers = torch.nn.ModuleDict({str(layer): ToyLayer(config, layer, groups) for layer in layers})

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> Any:
        state: dict[str, Any] = {}
        for name, layer in self.layers.items():
            state.update(layer.sharded_state_dict(f"{prefix}layers.{name}.", sharded_offsets, metadata))
        return state


def toy_model(num_layers: int = 4) -> Model:
    """Settings of which the toy reads the number of layers; the rest satisfies the layout's rules."""
    model = Model(num_layers=num_layers)
    model.moe.num_experts = EXPERTS
    model.moe.top_k = 2
    return model


def build_toy(world: int, parallel: Parallel, precision: Precision, optim: Optim | None = None) -> Any:
    """(chunks, optimizer, groups) on this rank, moments allocated, values those of ``draw(seed=0)``."""
    model = toy_model()
    model.precision = precision
    layout = make_layout(model, parallel, world)
    groups = start_groups(layout, seed=5)
    config = make_config(model, parallel, layout)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    chunks = []
    for chunk in range(layout.vp):
        toy = ToyModel(config, chunk_layers(layout, groups.pp_rank, chunk), groups)
        chunks.append(
            DistributedDataParallel(config, ddp, toy, disable_bucketing=chunk > 0, pg_collection=groups.pg)
        )
    for sharded in local_tensors(chunks, groups):
        sharded.data.data.copy_(draw(sharded, seed=0))
    optimizer = build_optimizer(optim or Optim(), chunks, groups)
    reload_master_weights(optimizer)
    allocate_state(optimizer)
    return chunks, optimizer, groups


def train_toy(
    chunks: Sequence[Any], optimizer: Any, groups: Groups, *, steps: int, start: int = 0
) -> list[float]:
    """Take optimizer steps with drawn gradients; returns the gradient norms."""
    norms = []
    for step in range(start, start + steps):
        for sharded in local_tensors(chunks, groups):
            if isinstance(sharded.data, torch.nn.Parameter):
                main_grad = sharded.data.main_grad
                replace(sharded, data=main_grad.view_as(sharded.data), dtype=torch.float32).data.copy_(
                    draw(sharded, seed=step + 1)
                )
            else:
                sharded.data.add_(1.0)
        norms.append(optimizer_step(optimizer).grad_norm)
    return norms


def draw(sharded: ShardedTensor, seed: int) -> torch.Tensor:
    """This rank's part of the standard normal tensor that belongs to a global name and a seed."""
    generator = torch.Generator().manual_seed(zlib.crc32(sharded.key.encode()) + seed)
    whole = torch.randn(sharded.global_shape, generator=generator)
    return whole[part(sharded)].reshape(sharded.data.shape)


def part(sharded: ShardedTensor) -> tuple[slice, ...]:
    """Where this rank's part lies in the global tensor."""
    sizes = (1,) * sharded.prepend_axis_num + tuple(sharded.local_shape)
    return tuple(slice(o, o + n) for o, n in zip(sharded.global_offset, sizes, strict=True))


def local_tensors(chunks: Sequence[Any], groups: Groups) -> Iterator[ShardedTensor]:
    """This rank's sharded tensors of all chunks."""
    for leaf in nested_values(model_state(chunks, groups)):
        assert isinstance(leaf, ShardedTensor), leaf
        yield leaf


def parts(state: Any) -> list[tuple[str, tuple[int, ...], tuple[slice, ...], torch.Tensor]]:
    """Every sharded tensor of a state as (name, global shape, place, value), fit for another process."""
    return [
        (leaf.key, tuple(leaf.global_shape), part(leaf), leaf.data.detach().clone())
        for leaf in nested_values(state)
        if isinstance(leaf, ShardedTensor)
    ]


def optimizer_values(chunks: Sequence[Any], optimizer: Any, groups: Groups) -> dict[int, dict[str, Any]]:
    """Master weights and moments of this rank's parameters, whole, whoever would write them."""
    state = optimizer_state(optimizer, model_state(chunks, groups), loading=False)
    for leaf in nested_values(state):
        leaf.replica_id = 0
    fetch_optimizer_state(optimizer, state)
    return state


def everything(chunks: Sequence[Any], optimizer: Any, groups: Groups) -> list[Any]:
    """``parts`` of all that a checkpoint holds of this rank's model and optimizer."""
    return parts(model_state(chunks, groups)) + parts(optimizer_values(chunks, optimizer, groups))


def assemble(ranks: list[list[Any]]) -> dict[str, torch.Tensor]:
    """Whole tensors from all ranks' parts; replicas must agree bit for bit and no element may be missing."""
    whole: dict[str, torch.Tensor] = {}
    seen: dict[str, torch.Tensor] = {}
    for name, shape, place, value in (each for rank in ranks for each in rank):
        if name not in whole:
            whole[name] = torch.zeros(shape, dtype=value.dtype)
            seen[name] = torch.zeros(shape, dtype=torch.bool)
        value = value.reshape(whole[name][place].shape)
        known = seen[name][place]
        assert torch.equal(whole[name][place][known], value[known]), f"replicas of {name} differ"
        whole[name][place] = value
        seen[name][place] = True
    for name, mask in seen.items():
        assert bool(mask.all()), f"{name} is incomplete"
    return whole
