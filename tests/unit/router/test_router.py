"""K3Router: formula, gradients, what is counted, and the end of a step."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.utils import init_method_normal
from torch.utils.checkpoint import checkpoint

from k3train.config import schema
from k3train.router.router import K3Router
from k3train.router.update import set_biases, update_biases
from tests import ranks  # noqa: F401 - installs the CPU bridge


def make_router(experts=8, top_k=2, hidden=16, rule=schema.RouterRule.quantile, layer=1, **settings):
    model_parallel_cuda_manual_seed(7, tp_rank=0, ep_rank=0, etp_rank=0, force_reset_rng=True)
    config = SimpleNamespace(
        hidden_size=hidden,
        num_moe_experts=experts,
        moe_router_topk=top_k,
        init_method=init_method_normal(0.5),
        sequence_parallel=True,
        use_cpu_initialization=True,
        perform_initialization=True,
    )
    return K3Router(config, layer, settings=schema.Router(rule=rule, **settings))


def test_routes_follow_the_formula():
    router, x = make_router(), torch.randn(3, 5, 16)
    set_biases([router], (torch.randn(8) * 0.3)[None])
    experts, weights = router(x)
    scores = torch.sigmoid(x.reshape(15, 16) @ router.weight.T)
    expected = (scores + router.bias).topk(2).indices
    assert torch.equal(experts, expected)
    chosen = scores.gather(1, expected)
    torch.testing.assert_close(weights, chosen / chosen.sum(1, keepdim=True))
    assert (scores.topk(2).indices != expected).any()


def test_bias_decides_the_choice_but_not_the_weights():
    router, x = make_router(experts=4, top_k=4, rule=schema.RouterRule.none), torch.randn(6, 16)
    before = router(x)
    set_biases([router], torch.tensor([[0.0, 5.0, 0.0, -5.0]]))
    after = router(x)
    assert not torch.equal(before.experts, after.experts)
    unsorted = [torch.zeros(6, 4).scatter(1, r.experts, r.weights) for r in (before, after)]
    torch.testing.assert_close(*unsorted)


def test_gradient_flows_through_scores_only():
    router, x = make_router().double(), torch.randn(4, 16, dtype=torch.float64)
    direction = torch.randn(4, 2, dtype=torch.float64)

    def loss(weight, tokens):
        scores = torch.sigmoid(tokens @ weight.T)
        chosen = scores.gather(1, routes.experts)
        return (chosen / chosen.sum(1, keepdim=True) * direction).sum()

    x.requires_grad_()
    routes = router(x)
    (routes.weights * direction).sum().backward()
    weight, tokens = router.weight.detach().clone().requires_grad_(), x.detach().clone().requires_grad_()
    loss(weight, tokens).backward()
    torch.testing.assert_close(router.weight.grad, weight.grad)
    torch.testing.assert_close(x.grad, tokens.grad)
    assert not router.bias.requires_grad


def test_bf16_input_is_routed_in_fp32():
    router = make_router().bfloat16()
    assert router.weight.dtype is router.bias.dtype is router.bounds.dtype is torch.float32
    x = torch.randn(64, 16).bfloat16().requires_grad_()
    experts, weights = router(x)
    scores = torch.sigmoid(x.detach().float() @ router.weight.T)
    assert weights.dtype is torch.float32
    assert torch.equal(experts, scores.topk(2).indices)
    weights[:, 0].sum().backward()
    assert x.grad.dtype is torch.bfloat16
    assert router.weight.grad.dtype is torch.float32


def test_checkpoint_holds_bias_and_bounds_and_no_statistics():
    assert set(make_router().state_dict()) == {"weight", "bias", "bounds"}
    assert set(make_router(rule=schema.RouterRule.none).state_dict()) == {"weight", "bias", "bounds"}


def test_counts_tokens_times_top_k_without_padding():
    router, x = make_router(), torch.randn(40, 16)
    valid = torch.arange(40) < 33
    experts = router(x, valid).experts
    router(x)
    assert int(router.loads.sum()) == (33 + 40) * 2
    expected = torch.bincount(torch.cat((experts[:33], experts)).reshape(-1), minlength=8)
    assert torch.equal(router.loads, expected)
    assert (router.rule.statistics().sum(-1) == 73).all()


def test_counts_once_under_recomputation():
    plain, recomputed = make_router(), make_router()
    x = torch.randn(30, 16, requires_grad=True)
    plain(x)
    checkpoint(lambda t: recomputed(t).weights, x, use_reentrant=True).sum().backward()
    assert int(recomputed.loads.sum()) == 60
    assert torch.equal(recomputed.rule.statistics(), plain.rule.statistics())


def test_evaluation_and_sampling_count_nothing():
    router = make_router()
    with torch.no_grad():
        router(torch.randn(9, 16))
    router.eval()
    router(torch.randn(9, 16))
    assert int(router.loads.sum()) == 0
    assert int(router.rule.statistics().sum()) == 0


def test_step_sets_bias_bounds_and_metrics_and_starts_anew():
    router = make_router()
    x = torch.randn(500, 16)
    router(x)
    load = router.loads.double()
    metrics = update_biases([router])[1]
    assert metrics["tokens"] == 500
    assert metrics["max_violation"] == pytest.approx(float(load.max() / load.mean()) - 1)
    assert metrics["load_cv"] == pytest.approx(float(load.std(correction=0) / load.mean()))
    assert metrics["dead_experts"] == int((load == 0).sum())
    assert metrics["bias_range"] == pytest.approx(float(router.bias.max() - router.bias.min()))
    assert metrics["bias_range"] > 0
    assert abs(float(router.bias.mean())) < 1e-6
    torch.testing.assert_close(router.bounds, torch.stack((router.bias.min() - 1, router.bias.max() + 1)))
    assert int(router.loads.sum()) == int(router.rule.statistics().sum()) == 0
    router(x)
    assert update_biases([router])[1]["max_violation"] < metrics["max_violation"]


def test_skipped_step_forgets_its_tokens_and_keeps_the_bias():
    router, other = make_router(), make_router()
    good, bad = torch.randn(200, 16), torch.randn(200, 16) + 3
    router(bad)
    assert update_biases([router], discard=True) == {}
    assert torch.equal(router.bias, torch.zeros(8))
    for one in (router, other):
        one(good)
        update_biases([one])
    assert torch.equal(router.bias, other.bias)


def test_rule_none_keeps_the_bias_and_reports_loads():
    router = make_router(rule=schema.RouterRule.none)
    router(torch.randn(100, 16))
    metrics = update_biases([router])[1]
    assert metrics["tokens"] == 100
    assert metrics["max_violation"] > 0
    assert torch.equal(router.bias, torch.zeros(8))


def test_layers_are_told_apart():
    routers = [make_router(layer=3), make_router(layer=4)]
    routers[0](torch.randn(50, 16))
    metrics = update_biases([torch.nn.ModuleList(routers)])
    assert {n: m["tokens"] for n, m in metrics.items()} == {3: 50, 4: 0}
    assert metrics[4]["max_violation"] == metrics[4]["load_cv"] == 0


def test_balances_896_experts_within_six_steps_from_a_skewed_start():
    tokens, experts, top_k, hidden = 16_384, 896, 16, 32
    router = make_router(experts, top_k, hidden)
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        router.weight.normal_(std=1 / hidden**0.5, generator=g)
        offsets = torch.randn(experts, generator=g) * 0.5
        router.weight[:, 0] = offsets  # column of a constant input
    violations = [float("inf")]
    while violations[-1] >= 0.25 and len(violations) <= 6:
        x = torch.randn(tokens, hidden, generator=g)
        x[:, 0] = 1.0
        router(x)
        violations.append(update_biases([router])[1]["max_violation"])
    assert violations[1] > 5
    assert violations[-1] < 0.25, violations
