"""Gated MLA against plain formulas, and on every way of sharding it against one rank."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from k3train.config import schema
from k3train.kernels.packing import make_packing
from k3train.model.config import make_config
from k3train.model.mla import GatedMla
from k3train.parallel.groups import start_groups, stop_groups
from k3train.parallel.layout import make_layout
from tests import sharded
from tests.ranks import run_ranks

MODEL = schema.Model(
    num_layers=1,
    hidden_size=16,
    num_heads=4,
    init_std=0.3,
    mla=schema.Mla(q_lora_rank=12, kv_lora_rank=6, qk_head_dim=5, qk_shared_head_dim=3, v_head_dim=7),
)
BORDERS = (0, 5, 6, 7, 18, 24)


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + MODEL.mla.norm_eps) * weight


def _reference(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    """k3 report eq. 7 on one document [t, hidden], with explicit heads and an explicit mask."""
    mla, heads = MODEL.mla, MODEL.num_heads
    q = (_rms(x @ w["q_a.weight"].T, w["q_a_norm.weight"]) @ w["q_b.weight"].T).unflatten(-1, (heads, -1))
    c, shared = (x @ w["kv_a.weight"].T).split([mla.kv_lora_rank, mla.qk_shared_head_dim], -1)
    kv = (_rms(c, w["kv_a_norm.weight"]) @ w["kv_b.weight"].T).unflatten(-1, (heads, -1))
    k = torch.cat([kv[..., : mla.qk_head_dim], shared[:, None].expand(-1, heads, -1)], -1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * (mla.qk_head_dim + mla.qk_shared_head_dim) ** -0.5
    later = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).triu(1)
    p = scores.masked_fill(later, -torch.inf).softmax(-1)
    out = torch.einsum("hqk,khe->qhe", p, kv[..., mla.qk_head_dim :]).flatten(1)
    return (out * torch.sigmoid(x @ w["g_proj.weight"].T)) @ w["o_proj.weight"].T


def _inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(24, 16, generator=generator), torch.randn(24, 16, generator=generator)


def _run(rank: int, degrees: dict[str, Any], values: dict[str, Tensor] | None):
    """Output and gradients of the layer, this rank's part of each."""
    parallel = schema.Parallel(**degrees)
    layout = make_layout(MODEL, parallel, dist.get_world_size())
    groups = start_groups(layout, seed=1)
    layer = GatedMla(make_config(MODEL, parallel, layout), layer_number=1, pg_collection=groups.pg)
    torch.nn.init.normal_(layer.q_a_norm.weight)
    torch.nn.init.normal_(layer.kv_a_norm.weight)
    if values is not None:
        sharded.load([layer], groups, values)
    x, direction = _inputs()
    place = groups.cp_rank * layout.tp + groups.tp_rank
    x = x.chunk(layout.cp * layout.tp)[place].clone().requires_grad_()
    packing = make_packing(BORDERS, torch.ones(24, dtype=torch.bool), rank=groups.cp_rank, size=layout.cp)
    out, bias = layer(x[:, None], packed_seq_params=packing)
    assert bias is None
    (out[:, 0] * direction.chunk(layout.cp * layout.tp)[place]).sum().backward()
    for parameter in layer.parameters():
        dist.all_reduce(parameter.grad, group=groups.pg.dp_cp)
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(parameter.grad, group=groups.pg.tp)
    result = out.detach(), x.grad, place, sharded.shards([layer], groups, of_gradients=True)
    weights = sharded.shards([layer], groups)
    stop_groups()
    return *result, weights


def _whole(results):
    results = sorted(results, key=lambda r: r[2])
    out = torch.cat([r[0][:, 0] for r in results])
    grad_x = torch.cat([r[1] for r in results])
    return {"out": out, "x": grad_x, **sharded.whole([s for r in results for s in r[3]])}


@pytest.fixture(scope="module")
def one_rank():
    results = run_ranks(1, _run, {}, None)
    return sharded.whole(results[0][4]), _whole(results)


def test_equals_plain_formulas_document_by_document(one_rank):
    values, got = one_rank
    w = {key: value.double().requires_grad_() for key, value in values.items()}
    x, direction = (t.double() for t in _inputs())
    x.requires_grad_()
    out = torch.cat([_reference(x[a:b], w) for a, b in itertools.pairwise(BORDERS)])
    grads = torch.autograd.grad((out * direction).sum(), [x, *w.values()])
    for key, want in zip(["out", "x", *w], [out, *grads], strict=True):
        torch.testing.assert_close(got[key].double(), want, rtol=2e-5, atol=2e-6, msg=key)


# cp 4 with tp 2 has two parts of one head and two shares of the queries; cp 3 three shares for all heads.
DEGREES = [{"tp": 2}, {"cp": 2}, {"cp": 4}, {"tp": 2, "cp": 2}, {"cp": 3}, {"tp": 2, "cp": 4}]
SELECTIVE = [{}, {"tp": 2, "cp": 2}, {"cp": 3}]


@pytest.mark.parametrize(
    ("degrees", "selective"),
    [(each, False) for each in DEGREES] + [(each, True) for each in SELECTIVE],
    ids=str,
)
def test_sharded_equals_one_rank(one_rank, degrees, selective):
    values, want = one_rank
    ranks = degrees.get("tp", 1) * degrees.get("cp", 1)
    recompute = schema.Recompute.selective if selective else schema.Recompute.none
    got = _whole(run_ranks(ranks, _run, {**degrees, "recompute": recompute}, values))
    assert got.keys() == want.keys()
    for key in want:
        torch.testing.assert_close(got[key], want[key], rtol=1e-5, atol=1e-6, msg=key)
