"""LatentMoe on one rank against plain formulas: values, every gradient, and lopsided routing."""

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from k3train.config import schema
from k3train.kernels.packing import make_packing
from k3train.model.config import make_config
from k3train.model.moe import LatentMoe
from k3train.parallel.groups import start_groups
from k3train.parallel.layout import make_layout
from k3train.router.update import set_biases
from tests.parity.moe_reference import dense_moe
from tests.ranks import run_ranks


def model_of(**moe):
    model = schema.Model(hidden_size=24, init_std=0.3)
    model.moe = schema.Moe(
        **{
            "num_experts": 8,
            "top_k": 3,
            "expert_ffn_size": 10,
            "latent_size": 12,
            "num_shared_experts": 2,
            "shared_ffn_size": 7,
            **moe,
        }
    )
    return model


def build(model, dtype=torch.float64):
    layout = make_layout(model, schema.Parallel(), 1)
    config = make_config(model, schema.Parallel(), layout)
    layer = LatentMoe(config, 2, start_groups(layout, seed=11).pg)
    return layer if dtype is None else layer.to(dtype)


def compare(model, bias, skew=0.0, tokens=37):
    """Largest differences of output and gradients between the layer and the formulas, in float64."""
    layer = build(model)
    with torch.no_grad():
        layer.router.weight[0] += skew  # constant over inputs whose first channel is 1
    set_biases([layer.router], bias[None])
    if model.moe.latent_norm:
        layer.latent_norm.weight.data.uniform_(0.5, 1.5)
    x = torch.randn(tokens, 1, model.hidden_size, dtype=torch.float64, requires_grad=True)
    out, none = layer(x)
    assert none is None
    direction = torch.randn_like(out)
    (out * direction).sum().backward()
    state = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    p = {n: t.detach().clone().requires_grad_(t.requires_grad) for n, t in state.items()}
    again = x.detach().clone().requires_grad_()
    expected = dense_moe(p, again.squeeze(1), model)
    (expected * direction.squeeze(1)).sum().backward()
    worst = {"out": (out.squeeze(1) - expected).abs().max(), "x": (x.grad - again.grad).abs().max()}
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        grad = torch.zeros_like(p[name]) if p[name].grad is None else p[name].grad
        worst[name] = (parameter.grad - grad).abs().max()
    return {n: float(v) for n, v in worst.items()}, layer.router.loads.tolist()


def in_one_rank(rank, function, *args):
    return function(*args)


@pytest.mark.parametrize(
    "moe",
    [
        {},
        {"latent_norm": False},
        {"num_shared_experts": 0},
        {"num_experts": 5, "top_k": 1},
        {"num_experts": 16, "top_k": 15},
        {"router": schema.Router(input=schema.RouterInput.latent)},
    ],
    ids=str,
)
def test_values_and_gradients_match_the_formulas(moe):
    model = model_of(**moe)
    worst, loads = run_ranks(1, in_one_rank, compare, model, torch.randn(model.moe.num_experts) * 0.2)[0]
    assert max(worst.values()) < 1e-10, worst
    assert sum(loads) == 37 * model.moe.top_k


@pytest.mark.parametrize("favourites", [[3], [0, 7], [1, 2, 4]])
def test_experts_without_tokens_and_one_with_all(favourites):
    """A bias of +-9 overrules every score: with top-1 some experts get everything, the others nothing."""
    model = model_of(top_k=len(favourites))
    bias = torch.full((8,), -9.0)
    bias[favourites] = 9.0
    worst, loads = run_ranks(1, in_one_rank, compare, model, bias)[0]
    assert max(worst.values()) < 1e-10, worst
    assert [i for i, load in enumerate(loads) if load] == favourites
    assert all(loads[i] == 37 for i in favourites)


def fp32_gap(model):
    layer = build(model, torch.float32)
    x = torch.randn(50, 1, model.hidden_size)
    out = layer(x)[0].squeeze(1)
    state = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    expected = dense_moe({n: t.detach().double() for n, t in state.items()}, x.squeeze(1).double(), model)
    return float((out - expected).abs().max() / expected.abs().max())


def test_fp32_is_close_to_float64():
    assert run_ranks(1, in_one_rank, fp32_gap, model_of())[0] < 2e-6


def bf16_layer(model):
    model.precision = schema.Precision.bf16
    layer = build(model, None)
    x = torch.randn(50, 1, model.hidden_size).bfloat16().requires_grad_()
    out = layer(x)[0]
    out.float().square().sum().backward()
    state = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    p = {n: t.detach().double() for n, t in state.items()}
    expected = dense_moe(p, x.detach().squeeze(1).double(), model)
    fp32 = sorted(n for n, t in layer.named_parameters() if t.dtype is torch.float32)
    finite = all(torch.isfinite(t.grad).all() for t in layer.parameters())
    return out.dtype, float((out.squeeze(1) - expected).abs().max() / expected.abs().max()), fp32, finite


def test_bf16_keeps_router_and_norm_in_fp32():
    dtype, gap, fp32, finite = run_ranks(1, in_one_rank, bf16_layer, model_of())[0]
    assert dtype is torch.bfloat16
    assert gap < 0.03
    assert fp32 == ["latent_norm.weight", "router.weight"]
    assert finite


def padding_counts(model):
    layer = build(model, torch.float32)
    x = torch.randn(40, 1, model.hidden_size)
    valid = torch.arange(40) < 31
    layer(x, packed_seq_params=make_packing((0, 20, 31, 40), valid))
    by_packing = layer.router.rule.statistics().clone()
    layer.router.reset()
    layer(x, padding_mask=~valid[None])
    by_mask = layer.router.rule.statistics().clone()
    layer.router.reset()
    layer(x[:31])
    return by_packing, by_mask, layer.router.rule.statistics().clone()


def test_padding_is_not_counted():
    by_packing, by_mask, alone = run_ranks(1, in_one_rank, padding_counts, model_of())[0]
    assert (alone.sum(1) == 31).all()
    assert torch.equal(by_packing, alone)
    assert torch.equal(by_mask, alone)


def with_megatron_s_own_config(model):
    groups = start_groups(make_layout(model, schema.Parallel(), 1), seed=11)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=model.hidden_size,
        num_attention_heads=1,
        num_moe_experts=model.moe.num_experts,
        moe_router_topk=model.moe.top_k,
        gated_linear_unit=True,
        add_bias_linear=False,
    )
    config.k3 = model
    layer = LatentMoe(config, 1, groups.pg)
    x = torch.randn(9, 1, model.hidden_size)
    state = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    return float((layer(x)[0].squeeze(1) - dense_moe(state, x.squeeze(1), model)).abs().max())


def test_a_plain_megatron_config_that_carries_k3_is_enough():
    assert run_ranks(1, in_one_rank, with_megatron_s_own_config, model_of())[0] < 1e-5


def parameter_flags(model):
    layer = build(model)
    return {n: (getattr(p, "allreduce", True), tuple(p.shape)) for n, p in layer.named_parameters()}


def test_parameters():
    assert run_ranks(1, in_one_rank, parameter_flags, model_of())[0] == {
        "router.weight": (True, (8, 24)),
        "latent_down.weight": (True, (12, 24)),
        "experts.gate": (False, (8, 12, 10)),
        "experts.up": (False, (8, 12, 10)),
        "experts.down": (False, (8, 10, 12)),
        "latent_norm.weight": (True, (12,)),
        "latent_up.weight": (True, (24, 12)),
        "shared.gate_proj.weight": (True, (14, 24)),
        "shared.up_proj.weight": (True, (14, 24)),
        "shared.down_proj.weight": (True, (24, 14)),
    }
