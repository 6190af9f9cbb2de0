"""Counting the full Kimi K3 on the meta device, and what a checkpoint of a model holds."""

from __future__ import annotations

import torch

from k3train.config.compose import compose
from k3train.config.schema import Parallel
from k3train.model.build import build_model
from k3train.model.config import make_config
from k3train.parallel.groups import start_groups
from k3train.parallel.layout import make_layout
from k3train.plan.counts import count_parameters
from tests.ranks import run_ranks

NOT_PARAMETERS = ("bounds", "loads")
"""Buffers that are no part of the released checkpoint; the selection bias is."""


def _count(rank: int, overrides: list[str]):
    run = compose(overrides)
    layout = make_layout(run.model, Parallel(), 1)
    groups = start_groups(layout, seed=1)
    config = make_config(run.model, Parallel(), layout)
    (chunk,) = build_model(run.model, config, layout, groups, torch.device("meta"))
    tensors = [*chunk.named_parameters(), *chunk.named_buffers()]
    assert all(tensor.is_meta for _, tensor in tensors)
    total = sum(t.numel() for name, t in tensors if name.endswith("router.bias") or t.requires_grad)
    return total, count_parameters(run.model).total


def test_the_full_model_has_kimi_k3s_parameters():
    built, counted = run_ranks(1, _count, ["model=k3"])[0]
    assert built == counted == 2_779_484_476_000


def test_every_small_model_has_the_parameters_that_the_planner_counts():
    for overrides in ([], ["model.mtp.num_layers=1"], ["model.moe.latent_norm=false", "model.mla_every=2"]):
        built, counted = run_ranks(1, _count, overrides)[0]
        assert built == counted, overrides
