"""The list of parameters against models that are really built."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from k3train.config import schema
from k3train.config.compose import compose
from k3train.model.build import build_model
from k3train.model.config import make_config
from k3train.parallel.groups import start_groups
from k3train.parallel.layout import make_layout
from k3train.plan.counts import count_parameters
from k3train.plan.parameters import local_name, parameters
from tests.parity.test_model import MODEL
from tests.ranks import run_ranks

BARE = replace(
    MODEL,
    mtp=schema.Mtp(),
    num_dense_layers=2,
    precision=schema.Precision.bf16,
    moe=replace(MODEL.moe, latent_norm=False, num_shared_experts=0),
)


def built(rank: int, model: schema.Model) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    layout = make_layout(model, schema.Parallel(), 1)
    groups = start_groups(layout, seed=1)
    (chunk,) = build_model(
        model, make_config(model, schema.Parallel(), layout), layout, groups, torch.device("meta")
    )
    return {name: (tuple(p.shape), p.dtype) for name, p in chunk.named_parameters()}


@pytest.mark.parametrize("model", [MODEL, BARE], ids=["with MTP", "bf16, without options"])
def test_names_shapes_and_dtypes_are_the_model_s(model: schema.Model) -> None:
    dtype = torch.bfloat16 if model.precision is schema.Precision.bf16 else torch.float32
    listed = {p.name: (p.shape, torch.float32 if p.fp32 else dtype) for p in parameters(model)}
    assert listed == run_ranks(1, built, model)[0]


@pytest.mark.parametrize("preset", ["k3", "k3_48b", "debug"])
def test_sizes_add_up_to_the_count(preset: str) -> None:
    model = compose([f"model={preset}", "model.mtp.num_layers=1"]).model
    listed = list(parameters(model))
    assert len({p.name for p in listed}) == len(listed)
    total = sum(int(torch.Size(p.shape).numel()) for p in listed)
    routers = sum(p.local_name == "ffn.router.weight" for p in listed)
    assert total + routers * model.moe.num_experts == count_parameters(model).total  # selection biases


def test_names_within_a_layer() -> None:
    assert local_name("layers.17.ffn.experts.up") == local_name("mtp.ffn.experts.up") == "ffn.experts.up"
    assert local_name("output_mix.query") == "output_mix.query"
