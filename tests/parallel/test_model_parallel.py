"""Every layout trains as one rank does: loss, gradients, their norm and three optimizer steps."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from k3train.config import schema
from k3train.parallel.layout import make_layout
from k3train.plan.borders import pipeline_bytes
from tests import model_step
from tests.model_step import make_micro
from tests.parity.test_model import MODEL
from tests.ranks import run_ranks
from tests.train_steps import ADAMW, MUON, Trained, difference, train

# Ragged documents that cross shards, one-token ones, padding tails; 30 to 39 loss tokens.
MICROS = [
    make_micro((0, 1, 6, 7, 25, 36, 40), MODEL.vocab_size, seed=0),
    make_micro((0, 17, 40), MODEL.vocab_size, seed=1, padding=False),
    make_micro((0, 40), MODEL.vocab_size, seed=2, padding=False),
    make_micro((0, 9, 10, 30, 39, 40), MODEL.vocab_size, seed=3),
]
SIX = replace(MODEL, init_std=0.05)
"""Six layers in three blocks, MTP on. Larger weights would let each layer amplify rounding."""
EIGHT = replace(SIX, num_layers=8, mtp=schema.Mtp())
"""Eight layers in four blocks, without MTP."""
SELECTIVE, FULL = schema.Recompute.selective, schema.Recompute.full
GATHER = schema.Dispatcher.allgather
LAYOUTS = [
    ("dp2", SIX, {"world": 2}),
    ("tp2", SIX, {"tp": 2}),
    ("cp2", SIX, {"cp": 2, "cuda_graphs": True}),
    ("ep2", SIX, {"ep": 2, "world": 2}),
    ("pp2", SIX, {"pp": 2}),
    ("pp2x2", SIX, {"pp": 2, "vp": 2}),
    (
        "pp2x2 split 1-3-1-1 recompute",
        SIX,
        {"pp": 2, "vp": 2, "pipeline_split": [1, 3, 1, 1], "recompute": FULL},
    ),
    (
        "pp2x3 kda full, rest selective",
        SIX,
        {"pp": 2, "vp": 3, "recompute": SELECTIVE, "recompute_kda": FULL},
    ),
    ("cp4", SIX, {"cp": 4}),
    ("pp4 split 2-1-2-1", SIX, {"pp": 4, "pipeline_split": [2, 1, 2, 1]}),
    ("pp4x2 recompute", EIGHT, {"pp": 4, "vp": 2, "recompute": FULL}),
    ("tp2 cp2 ep2 selective", SIX, {"tp": 2, "cp": 2, "ep": 2, "recompute": SELECTIVE}),
    ("tp2 pp2 etp2", SIX, {"tp": 2, "pp": 2, "etp": 2}),
    ("tp2 ep4 allgather", SIX, {"tp": 2, "ep": 4, "world": 4, "dispatcher": GATHER}),
    ("pp2x2 cp2 ep2", SIX, {"pp": 2, "vp": 2, "cp": 2, "ep": 2}),
    ("tp2 pp2 ep2 dp2", SIX, {"tp": 2, "pp": 2, "ep": 2, "world": 8}),
    ("tp2 cp2 dp2", SIX, {"tp": 2, "cp": 2, "world": 8}),
    # two heads a tensor-parallel rank: MLA's queries are split as well
    ("tp2 cp4 ep4", SIX, {"tp": 2, "cp": 4, "ep": 4}),
    ("tp2 pp2x2 cp2 ep2", SIX, {"tp": 2, "pp": 2, "vp": 2, "cp": 2, "ep": 2}),
]


SLOW = ("pp2x2 split 1-3-1-1 recompute", "pp2x3 kda full, rest selective", "tp2 cp4 ep4", "tp2 pp2x2 cp2 ep2")
"""Layouts whose parts others cover; they run with ``-m slow``."""

ALSO_ADAMW = ("pp2x2", "tp2 cp2 ep2 selective")
"""Layouts that train with AdamW on every parameter too."""


@cache
def one_rank(num_layers: int, optimizer: schema.Optimizer) -> Trained:
    model = {model.num_layers: model for model in (SIX, EIGHT)}[num_layers]
    return train(model, MICROS, optim=MUON if optimizer is schema.Optimizer.muon else ADAMW)


@pytest.mark.parametrize(
    ("model", "layout", "optim"),
    [
        *(
            pytest.param(m, d, MUON, id=name, marks=[pytest.mark.slow] * (name in SLOW))
            for name, m, d in LAYOUTS
        ),
        *(pytest.param(m, d, ADAMW, id=f"{name} adamw") for name, m, d in LAYOUTS if name in ALSO_ADAMW),
    ],
)
def test_layout_trains_as_one_rank(request, model, layout, optim):
    want = one_rank(model.num_layers, optim.optimizer)
    got = train(model, MICROS, want.weights, optim=optim, **layout)
    losses = [abs(a / b - 1) for a, b in zip(got.losses, want.losses, strict=True)]
    norms = [abs(a / b - 1) for a, b in zip(got.norms, want.norms, strict=True)]
    gradient, which = difference(got.gradients, want.gradients)
    # A token whose margin rounds across a histogram bin moves a selection bias by a part of that bin.
    biases = {key for key in want.trained if key.endswith("router.bias")}
    bias = max(float((got.trained[key] - want.trained[key]).abs().max()) for key in biases)
    step, moved = difference(
        {key: value for key, value in got.trained.items() if key not in biases},
        {key: value for key, value in want.trained.items() if key not in biases},
    )
    name = request.node.callspec.id
    print(f"| {name} | {max(losses):.1e} | {gradient:.1e} | {norms[0]:.1e} | {max(norms):.1e} | {step:.1e} |")
    assert got.balance == want.balance
    assert losses[0] < 1e-6
    assert max(losses) < 5e-6
    assert norms[0] < 2e-6
    assert max(norms) < 1e-4
    assert gradient < 2e-5, which  # up to 1.5e-5 over six draws of the first weights
    assert step < 1e-5, moved
    assert bias < 3 / model.moe.router.quantile.bins


def test_routers_count_every_valid_token_once():
    valid = sum(int(micro.valid.sum()) for micro in MICROS)
    balance = one_rank(6, schema.Optimizer.muon).balance
    assert len(balance) == 6  # five decoder layers and MTP
    assert {numbers["tokens"] for numbers in balance.values()} == {valid}


def _first_weights(rank: int):
    chunks, _ = model_step.build(MODEL, {"pp": 2}, None)
    return {name: p.detach().clone() for name, p in chunks[0].named_parameters()}


def test_pipeline_ranks_draw_different_weights_and_share_the_embedding():
    first, last = run_ranks(2, _first_weights)
    a, b = first["layers.1.attention.q_proj.weight"], last["layers.4.attention.q_proj.weight"]
    assert a.shape == b.shape
    assert not torch.equal(a, b)
    torch.testing.assert_close(first["embedding.weight"], last["embedding.weight"], rtol=0, atol=0)


def test_without_mtp_the_last_pipeline_rank_holds_no_embedding():
    model = replace(MODEL, mtp=schema.Mtp(num_layers=0))
    first, last = run_ranks(2, _names, model)
    assert "embedding.weight" in first
    assert "embedding.weight" not in last
    assert not any(name.startswith("mtp") for name in last)


def _names(rank: int, model: schema.Model):
    return [name for name, _ in model_step.build(model, {"pp": 2}, None)[0][0].named_parameters()]


def _sent_bytes(rank: int, layout: dict) -> int:
    """Bytes of activations and gradients that this rank sends to pipeline neighbours in one step."""
    chunks, groups = model_step.build(SIX, layout, None)
    total, send = 0, torch.distributed.isend

    def counted(tensor, *args, **kwargs):
        nonlocal total
        total += tensor.nbytes
        return send(tensor, *args, **kwargs)

    torch.distributed.isend = counted  # this process ends with the test
    model_step.train_step(chunks, MICROS, groups)
    return total


@pytest.mark.parametrize("layout", [{"pp": 2, "vp": 2}, {"pp": 2, "vp": 3, "tp": 2}], ids=str)
def test_ranks_send_the_bytes_that_the_arithmetic_says(layout):
    world = layout["pp"] * layout.get("tp", 1)
    made = make_layout(SIX, schema.Parallel(**layout), world)
    message = pipeline_bytes(SIX, made, 40)["message_bytes"]
    passes = 2 * len(MICROS) * (len(made.pipeline_split) - 1)  # over each border, forward and backward
    assert sum(run_ranks(world, _sent_bytes, layout)) == passes * made.tp * message
