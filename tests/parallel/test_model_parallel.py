"""Every layout gives one rank's loss and gradients, and its checkpoint keys."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from k3train.config import schema
from tests import model_step
from tests.model_step import make_micro
from tests.parity.test_model import MODEL, randomise
from tests.ranks import run_ranks

# Ragged documents that cross the shards' borders, one-token ones, and a padding tail.
MICROS = [make_micro((0, 1, 6, 7, 25, 36, 40), MODEL.vocab_size, seed=s) for s in range(4)]
LAYOUTS = [
    {"tp": 2},
    {"cp": 2},
    {"pp": 2},
    {"pp": 2, "vp": 2},
    {"pp": 2, "vp": 2, "pipeline_split": [1, 3, 1, 1], "recompute": schema.Recompute.full},
    {"ep": 2, "world": 2},
    {"tp": 2, "cp": 2, "ep": 2},
    {"tp": 2, "pp": 2, "etp": 2},
]


@pytest.fixture(scope="module")
def one_rank():
    return model_step.step(MODEL, MICROS, prepare=randomise)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layout_equals_one_rank(one_rank, layout):
    got = model_step.step(MODEL, MICROS, one_rank.weights, **layout)
    assert got.loss == pytest.approx(one_rank.loss, rel=1e-6)
    assert got.weights.keys() == one_rank.weights.keys()
    assert got.gradients.keys() == one_rank.gradients.keys()
    for key, want in one_rank.gradients.items():
        error = (got.gradients[key] - want).abs().max()
        assert error <= 2e-5 * want.abs().max() + 1e-7, (key, error, want.abs().max())


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
