"""What is fp32 in a bf16 model from its parameters to its checkpoint, and a norm that knows no layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values

from k3train.checkpoint.state import model_state, optimizer_state
from k3train.config.schema import Precision
from k3train.optim.build import members
from k3train.optim.slices import master_slices
from k3train.plan.parameters import parameters
from tests.parallel.test_checkpoint_model import build
from tests.parallel.toy import train_toy
from tests.parity.test_model import MODEL
from tests.ranks import run_ranks

KEPT = ("A_log", "dt_bias", "conv", "router.weight", "router.bias", "router.bounds", "norm", "query")
"""Parts of the names of what stays fp32."""


def dtypes(rank: int) -> dict[str, Any]:
    chunks, optimizer, groups = build({}, Precision.bf16)
    norms = train_toy(chunks, optimizer, groups, steps=2)
    model = chunks[0].module
    masters = {p: own for member in members(optimizer) for p, own in master_slices(member).items()}
    inner = [state for member in members(optimizer) for state in member.optimizer.state.values()]
    state = model_state(chunks, groups)
    saved = optimizer_state(optimizer, state, loading=False)
    buffers = {name: b.dtype for name, b in model.named_buffers() if b.is_floating_point()}
    return {
        "parameters": {name: p.dtype for name, p in model.named_parameters()} | buffers,
        "gradients": {p.main_grad.dtype for p in model.parameters()},
        "masters": {masters[p].dtype for p in model.parameters()},
        "moments": {value.dtype for each in inner for value in each.values() if value.is_floating_point()},
        "rounded": all(torch.equal(p.flatten(), masters[p].to(p.dtype)) for p in model.parameters()),
        "model file": {leaf.key: leaf.dtype for leaf in nested_values(state)},
        "optimizer file": {leaf.dtype for leaf in nested_values(saved)},
        "norms": norms,
    }


def norms(rank: int, degrees: dict[str, Any]) -> list[float]:
    return train_toy(*build(degrees, Precision.bf16), steps=2)


def test_fp32_from_parameter_to_checkpoint_and_one_norm_on_every_pipeline_split() -> None:
    (found,) = run_ranks(1, dtypes)
    kept = {name for name, dtype in found["parameters"].items() if dtype is torch.float32}
    assert kept == {name for name in found["parameters"] if any(part in name for part in KEPT)}
    assert {p.name for p in parameters(MODEL) if p.fp32} <= kept
    assert set(found["parameters"].values()) == {torch.bfloat16, torch.float32}
    assert found["gradients"] == found["masters"] == found["moments"] == {torch.float32}
    assert found["optimizer file"] == {torch.float32}
    assert found["rounded"]
    assert {name for name, dtype in found["model file"].items() if dtype is torch.float32} == kept
    for world, degrees in (
        (2, {"pp": 2, "pipeline_split": [1, 5]}),
        (2, {"pp": 2, "vp": 3}),
    ):
        assert run_ranks(world, norms, degrees) == [pytest.approx(found["norms"], rel=1e-6)] * world
