"""Muon and QK-Clip on real ranks against plain loops over whole tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)

from k3train.config import schema
from k3train.model.payload import schedule_config
from k3train.optim import exchange as exchange_module
from k3train.optim.adam import GroupStepAdam
from k3train.optim.build import build_optimizer, forget_logits, largest_logit, members
from k3train.optim.exchange import Exchange, Matrix, Piece
from k3train.optim.qk_clip import mla_layers
from tests import model_step
from tests.muon_reference import PlainMuon
from tests.optimizer_step import optimizer_step
from tests.parallel.test_model_parallel import MICROS, SIX
from tests.parity.test_model import randomise
from tests.ranks import run_ranks
from tests.train_steps import MUON

OPTIONS = {
    "K3's": MUON,
    "whole projections, no Nesterov, six steps": replace(
        MUON,
        muon=schema.Muon(
            per_head=False, nesterov=False, momentum=0.9, newton_schulz_steps=6, update_scale=0.3
        ),
        qk_clip=schema.QkClip(),
    ),
}


def build(optim: schema.Optim) -> Any:
    """(chunks, wrapped chunks, optimizer, groups) of the six-layer model on one rank."""
    chunks, groups = model_step.build(SIX, {}, randomise)
    config = schedule_config(chunks[0].config, groups.layout)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    wrapped = [DistributedDataParallel(config, ddp, chunks[0], pg_collection=groups.pg)]
    optimizer = build_optimizer(optim, wrapped, groups)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return chunks, wrapped, optimizer, groups


def follow(rank: int, optim: schema.Optim) -> dict[str, Any]:
    """Three steps of the real optimizer on one rank, each followed by the plain one on the same gradients."""
    chunks, wrapped, optimizer, groups = build(optim)
    parameters = dict(chunks[0].named_parameters())
    plain = PlainMuon(SIX, optim, {name: p.detach() for name, p in parameters.items()})
    errors, clipped = [], 0
    layers = {module: name for name, module in chunks[0].named_modules() if module in mla_layers(chunks)}
    for _ in range(3):
        wrapped[0].zero_grad_buffer()
        optimizer.zero_grad()
        model_step.run_schedule(wrapped, MICROS, groups)
        largest = {
            name: layer.max_logits.clone() for layer, name in layers.items() if layer.max_logits is not None
        }
        gradients = {name: p.main_grad.clone() for name, p in parameters.items()}
        outcome = optimizer_step(optimizer)
        factor = min(1.0, optim.clip_grad_norm / outcome.grad_norm)
        plain.step({name: g * factor for name, g in gradients.items()}, optim.learning_rate)
        for name, logits in largest.items():
            plain.clip(name, logits)
            clipped += int((logits > optim.qk_clip.threshold).sum())
        if largest:
            assert largest_logit(optimizer) == max(float(logits.max()) for logits in largest.values())
        errors.append(
            max(float((p.double() - plain.weights[n]).norm() / p.norm()) for n, p in parameters.items())
        )
    return {"errors": errors, "clipped": clipped, "heads": 3 * len(layers) * SIX.num_heads}


@pytest.mark.parametrize("optim", OPTIONS.values(), ids=OPTIONS)
def test_three_steps_are_those_of_plain_loops(optim: schema.Optim) -> None:
    (found,) = run_ranks(1, follow, optim)
    assert max(found["errors"]) < 2e-6
    if optim.qk_clip.enabled:
        assert 0 < found["clipped"] < found["heads"]


def scattered(rank: int, dtype: torch.dtype, round_elements: int) -> Any:
    """Matrices cut over three ranks in every way: inside, over tensor-parallel shards, with copies."""
    exchange_module.ROUND_ELEMENTS = round_elements  # this process ends with the test
    whole = {m: torch.arange(m.elements).view(m.rows, m.columns) + 100.0 * i for i, m in enumerate(MATRICES)}
    shards = {m: [part.reshape(-1) for part in value.chunk(m.shards, m.dim)] for m, value in whole.items()}
    pieces, values, place = [], [], 0
    for matrix, shard, start, stop, copy in HELD[rank]:
        pieces.append((matrix, Piece(shard, start, stop, rank, place, copy)))
        part = shards[matrix][shard][start:stop]
        values.append(torch.full_like(part, -1.0) if copy else part)  # a copy's own values must not be read
        place += stop - start
    buffer = torch.cat(values).to(dtype)
    exchange = Exchange(pieces, dist.group.WORLD)
    seen = []

    def double(matrices: list[torch.Tensor]) -> list[torch.Tensor]:
        seen.extend(m.clone() for m in matrices)
        return [2 * m for m in matrices]

    exchange.apply(buffer, double)
    want = torch.cat([2 * shards[m][s][a:b] for m, s, a, b, _ in HELD[rank]]).to(dtype)
    owned = [m for m, o in zip(exchange.matrices, exchange.owners, strict=True) if o == rank]
    right = all(torch.equal(x, whole[m].to(dtype)) for x, m in zip(seen, owned, strict=True))
    both = [counts for each in exchange.rounds for counts in (each.asked_counts, each.answer_counts)]
    return torch.equal(buffer, want), right, len(owned), sum(sum(n) - n[rank] for n in both)


A, B, C, D = (
    Matrix("a", 0, 4, 5),
    Matrix("a", 1, 4, 5),
    Matrix("b", 0, 6, 4, shards=2, dim=1),
    Matrix("c", 0, 3, 3),
)
MATRICES = [A, B, C, D]
HELD = [
    [(A, 0, 0, 20, False), (B, 0, 0, 7, False), (D, 0, 0, 9, True)],
    [(B, 0, 7, 20, False), (C, 0, 0, 12, False), (D, 0, 0, 9, False)],
    [(C, 1, 0, 5, False), (C, 1, 5, 12, False)],
]


@pytest.mark.parametrize(("dtype", "round_elements"), [(torch.float32, 2**28), (torch.bfloat16, 12)], ids=str)
def test_owners_see_whole_matrices_and_every_holder_gets_its_part_back(
    dtype: torch.dtype, round_elements: int
) -> None:
    results = run_ranks(3, scattered, dtype, round_elements)
    assert all(equal and right for equal, right, _, _ in results)
    assert sum(count for _, _, count, _ in results) == len(MATRICES)
    assert 0 < sum(sent for *_, sent in results) <= 2 * sum(m.elements for m in MATRICES)


def forgotten(rank: int) -> tuple[bool, bool]:
    chunks, wrapped, optimizer, groups = build(replace(MUON, optimizer=schema.Optimizer.adamw))
    assert not any(member.optimizer.matrices for member in members(optimizer))
    (layer, *_) = mla_layers(chunks)

    def seen() -> bool:
        assert layer.max_logits is not None
        return bool((layer.max_logits > float("-inf")).all())

    model_step.run_schedule(wrapped, MICROS, groups)
    before = seen()
    forget_logits(optimizer)
    with torch.no_grad():
        place = model_step.packing(MICROS[0], groups)
        chunks[0](MICROS[0].tokens[None], place)
    return before, seen()


def test_logits_of_passes_without_a_step_are_forgotten() -> None:
    assert run_ranks(1, forgotten) == [(True, False)]


def counted(rank: int) -> set[int]:
    plain = GroupStepAdam.step

    def step(self: Any) -> None:
        plain(self)
        for group in self.param_groups:
            if not group["params"]:
                group["step"] = group.get("step", 0) + 1

    GroupStepAdam.step = step  # type: ignore[method-assign]
    _, wrapped, optimizer, groups = build(MUON)
    for _ in range(2):
        wrapped[0].zero_grad_buffer()
        optimizer.zero_grad()
        model_step.run_schedule(wrapped, MICROS, groups)
        optimizer_step(optimizer)
    return {int(group["step"]) for group in optimizer.param_groups}


def test_a_step_counts_once_beside_an_adamw_that_counts_for_empty_groups() -> None:
    """Transformer Engine's FusedAdam does."""
    assert run_ranks(1, counted) == [{2}]
