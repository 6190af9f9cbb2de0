"""The KDA layer against plain formulas, and on every way of sharding it against one rank."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from k3train.config import schema
from k3train.kernels.packing import make_packing
from k3train.model.config import make_config
from k3train.model.kda import KdaAttention
from k3train.parallel.groups import start_groups, stop_groups
from k3train.parallel.layout import make_layout
from tests import sharded
from tests.ranks import run_ranks

KDA = schema.Kda(head_dim=8, decay_rank=6)
MODEL = schema.Model(num_layers=1, hidden_size=16, num_heads=4, init_std=0.3, kda=KDA)
TOKENS = 160
PACKS = {"crossing": (0, 5, 150, 158, 159, TOKENS), "on borders": (0, 3, 4, 40, 120, 121, TOKENS)}


def _reference(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    """k3 report eq. 1-6 on one document [t, hidden], one token after the other."""
    heads, d = MODEL.num_heads, KDA.head_dim

    def branch(name: str) -> Tensor:
        y, taps = x @ w[f"{name}_proj.weight"].T, w[f"{name}_conv"]
        padded = torch.cat([y.new_zeros(3, y.shape[1]), y])
        y = sum(padded[i : i + len(x)] * taps[:, i] for i in range(4))
        return (y * torch.sigmoid(y)).view(-1, heads, d)

    def unit(y: Tensor) -> Tensor:
        return y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    q, k, v = unit(branch("q")) / d**0.5, unit(branch("k")), branch("v")
    beta = torch.sigmoid(x @ w["b_proj.weight"].T)
    z = (x @ w["f_a.weight"].T @ w["f_b.weight"].T + w["dt_bias"]).view(-1, heads, d)
    alpha = torch.exp(KDA.gate_lower_bound * torch.sigmoid(w["A_log"].exp()[:, None] * z))
    outs = []
    for h in range(heads):
        S, eye = x.new_zeros(d, d), torch.eye(d, dtype=x.dtype)
        for t in range(len(x)):
            kt, b = k[t, h][:, None], beta[t, h]
            S = (eye - b * kt @ kt.T) @ (alpha[t, h][:, None] * S) + b * kt @ v[t, h][None]
            outs.append(S.T @ q[t, h])
    o = torch.stack(outs).view(heads, len(x), d).transpose(0, 1)
    o = o / (o.square().mean(-1, keepdim=True) + KDA.norm_eps).sqrt() * w["o_norm"]
    gate = torch.sigmoid(x @ w["g_proj.weight"].T)
    return (o.flatten(1) * gate) @ w["o_proj.weight"].T


def _inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(TOKENS, 16, generator=generator), torch.randn(TOKENS, 16, generator=generator)


def _run(rank: int, degrees: dict[str, int], values: dict[str, Tensor] | None, borders: tuple[int, ...]):
    """Output and gradients of the layer, this rank's part of each."""
    parallel = schema.Parallel(**degrees)
    layout = make_layout(MODEL, parallel, dist.get_world_size())
    groups = start_groups(layout, seed=1)
    layer = KdaAttention(make_config(MODEL, parallel, layout), layer_number=1, pg_collection=groups.pg)
    torch.nn.init.normal_(layer.o_norm)
    torch.nn.init.normal_(layer.A_log, std=0.3)
    if values is not None:
        sharded.load([layer], groups, values)
    x, direction = _inputs()
    parts = layout.cp * layout.tp
    place = groups.cp_rank * layout.tp + groups.tp_rank
    x = x.chunk(parts)[place].clone().requires_grad_()
    packing = make_packing(borders, torch.ones(TOKENS, dtype=torch.bool), rank=groups.cp_rank, size=layout.cp)
    out, bias = layer(x[:, None], packed_seq_params=packing)
    assert bias is None
    (out[:, 0] * direction.chunk(parts)[place]).sum().backward()
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


@pytest.fixture(scope="module", params=PACKS.values(), ids=PACKS.keys())
def one_rank(request):
    results = run_ranks(1, _run, {}, None, request.param)
    return request.param, sharded.whole(results[0][4]), _whole(results)


def test_equals_plain_formulas_document_by_document(one_rank):
    borders, values, got = one_rank
    w = {key: value.double().requires_grad_() for key, value in values.items()}
    x, direction = (t.double() for t in _inputs())
    x.requires_grad_()
    out = torch.cat([_reference(x[a:b], w) for a, b in itertools.pairwise(borders)])
    grads = torch.autograd.grad((out * direction).sum(), [x, *w.values()])
    for key, want in zip(["out", "x", *w], [out, *grads], strict=True):
        assert (got[key].double() - want).norm() < 1e-5 * want.norm(), key


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"tp": 4}, {"cp": 2}, {"cp": 4}, {"tp": 2, "cp": 2}], ids=str)
def test_sharded_equals_one_rank(one_rank, degrees):
    borders, values, want = one_rank
    got = _whole(run_ranks(math.prod(degrees.values()), _run, degrees, values, borders))
    assert got.keys() == want.keys()
    for key in want:
        assert (got[key] - want[key]).norm() < 1e-5 * want[key].norm(), key


def _fresh(rank: int, model: schema.Model):
    parallel = schema.Parallel(tp=dist.get_world_size())
    layout = make_layout(model, parallel, dist.get_world_size())
    groups = start_groups(layout, seed=1)
    layer = KdaAttention(make_config(model, parallel, layout), layer_number=1, pg_collection=groups.pg)
    found = {name: p.detach().clone() for name, p in layer.named_parameters()}
    stop_groups()
    return found


def test_initial_half_lives():
    """At the start channels forget half of their state within 1.5 to 140 tokens, 14 in the middle."""
    model = schema.Model(num_layers=1, hidden_size=16, num_heads=4, kda=schema.Kda(head_dim=256))
    w = run_ranks(1, _fresh, model)[0]
    assert torch.equal(w["A_log"], torch.zeros(4))
    decay = -KDA.gate_lower_bound * torch.sigmoid(w["dt_bias"])
    half_life = math.log(2) / decay
    assert half_life.min() >= 1.4
    assert half_life.max() <= 140
    assert 10 < half_life.median() < 19


def test_ranks_draw_their_own_heads_and_agree_on_the_rest():
    first, second = run_ranks(2, _fresh, MODEL)
    for name in first:
        same = name in ("f_a.weight", "o_norm", "A_log")
        assert torch.equal(first[name], second[name]) == same, name


def _in_bf16(rank: int):
    model = schema.Model(
        num_layers=1, hidden_size=16, num_heads=4, kda=KDA, precision=schema.Precision.bf16, init_std=0.3
    )
    layout = make_layout(model, schema.Parallel(), 1)
    groups = start_groups(layout, seed=1)
    layer = KdaAttention(
        make_config(model, schema.Parallel(), layout), layer_number=1, pg_collection=groups.pg
    )
    wide = KdaAttention(
        make_config(MODEL, schema.Parallel(), layout), layer_number=1, pg_collection=groups.pg
    )
    wide.load_state_dict(
        {name: p.float() for name, p in layer.state_dict().items() if p is not None}, strict=False
    )
    x = _inputs()[0].bfloat16()[:, None]
    out, exact = layer(x)[0], wide(x.float())[0]
    out.sum().backward()
    dtypes = {name: p.dtype for name, p in layer.named_parameters()}
    finite = all(p.grad.isfinite().all() for p in layer.parameters())
    stop_groups()
    return out.detach().float(), exact.detach(), dtypes, finite


def test_bf16_keeps_small_parameters_in_fp32():
    out, exact, dtypes, finite = run_ranks(1, _in_bf16)[0]
    assert finite
    assert (out - exact).norm() < 2e-2 * exact.norm()
    wide = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert wide == {"A_log", "dt_bias", "q_conv", "k_conv", "v_conv", "o_norm"}


def _in_megatron(rank: int):
    """Built by megatron-core from a ModuleSpec and a plain TransformerConfig."""
    layout = make_layout(MODEL, schema.Parallel(), 1)
    groups = start_groups(layout, seed=1)
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=4)
    spec = ModuleSpec(module=KdaAttention, params={"settings": KDA})
    layer = build_module(spec, config=config, layer_number=1, pg_collection=groups.pg, cp_comm_type=None)
    x = torch.randn(30, 1, 16)
    borders = torch.tensor([0, 4, 20], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=borders, cu_seqlens_kv=borders)
    out, _ = layer(x, None, packed_seq_params=packed)
    parts = [layer(part)[0] for part in x.split([4, 16, 10])]
    rows = layer(torch.cat([x, 2 * x], 1))[0]
    alone = layer(2 * x)[0]
    with pytest.raises(ValueError, match="attention_mask"):
        layer(x, torch.ones(1, 1, 30, 30, dtype=torch.bool))
    with pytest.raises(ValueError, match="inference"):
        layer(x, inference_context=object())
    stop_groups()
    return [t.detach() for t in (out, torch.cat(parts), rows[:, 1:], alone)]


def test_megatron_core_alone():
    out, parts, row, alone = run_ranks(1, _in_megatron)[0]
    torch.testing.assert_close(out, parts, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(row, alone, rtol=1e-5, atol=1e-6)


def _refused(rank: int):
    layout = make_layout(MODEL, schema.Parallel(tp=2), 2)
    groups = start_groups(layout, seed=1)
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=4, tensor_model_parallel_size=2
    )
    with pytest.raises(ValueError, match="sequence_parallel=True"):
        KdaAttention(config, 1, groups.pg, settings=KDA)
    config = TransformerConfig(num_layers=1, hidden_size=15, num_attention_heads=3)
    with pytest.raises(ValueError, match=r"parallel\.tp = 2"):
        KdaAttention(config, 1, groups.pg, settings=KDA)
    stop_groups()
    return True


def test_refusals():
    assert run_ranks(2, _refused) == [True, True]
