"""The estimate of a rank's memory against what real ranks hold."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from k3train.checkpoint.stage import stage
from k3train.checkpoint.state import fetch_optimizer_state, model_state, optimizer_state
from k3train.config import schema
from k3train.config.schema import Mla, Optimizer, Precision, Recompute
from k3train.model.payload import schedule_config
from k3train.optim.build import allocate_state, build_optimizer, members
from k3train.optim.memory import rank_memory
from k3train.optim.rules import assignments
from k3train.parallel.groups import Groups, stop_groups
from k3train.plan.activations import Activations
from k3train.plan.recompute import recompute_plan
from tests import model_step
from tests.model_step import make_micro
from tests.parity import test_model
from tests.ranks import run_ranks
from tests.unit.kernels.test_recompute import Kept

MODEL = test_model.MODEL
BF16 = replace(MODEL, precision=Precision.bf16)
HELD: list[tuple[schema.Model, Optimizer, dict[str, Any]]] = [
    (MODEL, Optimizer.adamw, {"tp": 2, "pp": 2, "etp": 2}),
    (BF16, Optimizer.muon, {"tp": 2, "cp": 2, "ep": 2}),
    (BF16, Optimizer.adamw, {"pp": 2, "ep": 2}),
    (BF16, Optimizer.adamw, {"ep": 2}),
]


def _held(rank: int) -> list[dict[str, tuple[int, int]]]:
    return [_of_layout(*each) for each in HELD]


def _of_layout(model: schema.Model, kind: Optimizer, degrees: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Bytes that this rank holds before the first step, and the estimate."""
    chunks, groups = model_step.build(model, degrees, None)
    shared = schedule_config(chunks[0].config, groups.layout)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    wrapped = [
        DistributedDataParallel(shared, ddp, chunk, disable_bucketing=i > 0, pg_collection=groups.pg)
        for i, chunk in enumerate(chunks)
    ]
    optim = schema.Optim(optimizer=kind)
    optimizer = build_optimizer(optim, wrapped, groups)
    allocate_state(optimizer)
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    state = sum(_state(member) for member in members(optimizer))
    activations = Activations(model, groups.layout, recompute_plan(schema.Parallel()), 64)
    estimate = rank_memory(activations, assignments(model, optim), 2, groups.pp_rank)
    with tempfile.TemporaryDirectory() as folder, Kept() as kept:
        staged = stage(Path(folder), wrapped, optimizer, groups, b"")
    saved = kept.bytes()
    assert staged.shards
    fetched = _fetched(wrapped, optimizer, groups)
    stop_groups()
    return {
        "parameters": (sum(p.nbytes for p in parameters), estimate.parts["parameters"]),
        # Buffers are padded a little.
        "gradients": (sum(4 * p.numel() for p in parameters), estimate.parts["gradients"]),
        "optimizer state": (state, estimate.parts["optimizer state"]),
        "saving": (saved, estimate.saving),
        "fetching": fetched,
    }


def _fetched(chunks: list[Any], optimizer: Any, groups: Groups) -> tuple[int, int]:
    """Most bytes at once while a save fetches the optimizer's state, and what it may take: what this rank
    writes of it, and the largest bucket with a slice of it."""
    model = model_state(chunks, groups)
    state = optimizer_state(optimizer, model, loading=False)
    shared = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), groups.pg.dp_cp)
    shared.apply_saving_parallelization({**model, "optimizer": state})
    with _Most() as most:
        fetch_optimizer_state(optimizer, state)
    leaves = [leaf for values in state.values() for leaf in values.values()]
    own = sum(leaf.data.nbytes for leaf in leaves if is_main_replica(leaf.replica_id))
    buckets = [b.grad_data.nbytes for m in members(optimizer) for buffer in m.buffers for b in buffer.buckets]
    return most.most, own + 2 * max(buckets)


def _state(member: Any) -> int:
    kept = [t for values in member.optimizer.state.values() for t in values.values() if hasattr(t, "nbytes")]
    masters = [p for group in member.shard_fp32_from_float16_groups for p in group if p is not None]
    return sum(t.nbytes for t in (*kept, *masters))


def test_parameters_gradients_and_state_are_what_ranks_hold() -> None:
    ranks = run_ranks(4, _held)
    for i, (_, _, degrees) in enumerate(HELD):
        layouts = [rank[i] for rank in ranks]
        for found in layouts:
            held, estimate = found["parameters"]
            assert held == estimate, degrees
            held, estimate = found["gradients"]
            assert held == estimate, degrees
            most, allowed = found["fetching"]
            assert most <= allowed, degrees
        # A bucket is cut into equal slices whatever lies in it: together ranks hold what is estimated.
        held, estimate = (sum(found["optimizer state"][j] for found in layouts) for j in (0, 1))
        assert held == estimate, degrees
        for estimate in {found["saving"][1] for found in layouts}:
            # That of the rank that writes most; small buffers, which are no parameters, move it a little.
            held = max(found["saving"][0] for found in layouts if found["saving"][1] == estimate)
            assert held == pytest.approx(estimate, rel=1e-3), degrees


ATTENDING = replace(
    MODEL,
    mla_layers=list(range(MODEL.num_layers)),
    hidden_size=48,
    mla=Mla(q_lora_rank=16, kv_lora_rank=24, qk_head_dim=16, qk_shared_head_dim=8, v_head_dim=24),
)
"""MLA with equal sizes of keys and values, which the CPU computes without padding, as the GPU does."""
POLICIES: list[dict[str, Any]] = [
    {},
    {"recompute": Recompute.selective},
    {"recompute": Recompute.full},
    {"recompute": Recompute.full, "recompute_moe": Recompute.none},
]
TOKENS = 1024


def _kept(rank: int, degrees: dict[str, int]) -> list[tuple[int, int]]:
    """Bytes kept under each policy, and the estimate."""
    found = []
    micro = make_micro((0, TOKENS), ATTENDING.vocab_size, 0, padding=False)
    for policy in POLICIES:
        chunks, groups = model_step.build(ATTENDING, {**degrees, **policy}, None)
        place = model_step.packing(micro, groups)
        part = slice(place.start, place.stop)
        with Kept() as kept:
            losses = chunks[0](
                micro.tokens[None, part],
                place,
                labels=micro.labels[None, part],
                labels_mtp=micro.labels_mtp[None, part],
            )
        size = kept.bytes()
        losses.sum().backward()
        recompute = recompute_plan(schema.Parallel(**policy))
        estimate = Activations(ATTENDING, groups.layout, recompute, TOKENS)
        found.append((size, estimate.chunk(0, 0)))
        stop_groups()
    return found


@pytest.mark.parametrize(
    "degrees", [{}, pytest.param({"tp": 2, "cp": 2, "ep": 2}, marks=pytest.mark.slow)], ids=str
)
def test_activations_are_what_ranks_keep(degrees: dict[str, int]) -> None:
    """The CPU copies attention's output once more and applies MLA's gate in place: routing is uneven on
    either device: within a third."""
    for found in run_ranks(4 if degrees else 1, _kept, degrees):
        for policy, (kept, estimate) in zip(POLICIES, found, strict=True):
            assert kept == pytest.approx(estimate, rel=1 / 3), policy


class _Most(Kept):
    """Notes the most bytes that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.made = {ref: size for ref, size in self.made.items() if not ref.expired()}
        self.most = max(self.most, sum(self.made.values()))
        return out


def _most_in_a_forward_pass(rank: int, degrees: dict[str, int]) -> list[tuple[int, int]]:
    """Most bytes of an evaluation's pass under each policy, and the estimate."""
    found = []
    micro = make_micro((0, TOKENS), ATTENDING.vocab_size, 0, padding=False)
    for policy in POLICIES:
        chunks, groups = model_step.build(ATTENDING, {**degrees, **policy}, None)
        wrapped = model_step.wrap(chunks, groups)
        for chunk in wrapped:
            chunk.eval()
        with torch.no_grad(), _Most() as most:
            model_step.run_schedule(wrapped, [micro] * groups.layout.pp, groups, forward_only=True)
        recompute = recompute_plan(schema.Parallel(**policy))
        estimate = Activations(ATTENDING, groups.layout, recompute, TOKENS).forward(groups.pp_rank)
        found.append((most.most, estimate))
        stop_groups()
    return found


@pytest.mark.parametrize("degrees", [{}, {"pp": 2, "vp": 2}], ids=str)
def test_a_pass_without_gradients_takes_what_is_estimated(degrees: dict[str, int]) -> None:
    """Never more; less, because what a sublayer is done with is freed and the CPU gates in place."""
    for found in run_ranks(degrees.get("pp", 1), _most_in_a_forward_pass, degrees):
        for policy, (most, estimate) in zip(POLICIES, found, strict=True):
            assert 0.6 < most / estimate <= 1, policy
