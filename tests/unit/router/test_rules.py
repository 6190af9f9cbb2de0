"""The rules besides the histogram quantile: exact quantile, sign, auxiliary loss, averaging, one contract."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3train.config import schema
from k3train.router.audit import Audit
from k3train.router.choose import make_rule
from k3train.router.smooth import Smooth
from k3train.router.update import start_update, update_biases
from tests.unit.router.test_quantile import SCORES, loads, margins, random_scores
from tests.unit.router.test_router import make_router

Rule, Scope = schema.RouterRule, schema.BalanceScope
NOTHING = torch.zeros(0).long()


def exact_rule(experts, k, scope=Scope.global_batch, **smoothing):
    router = schema.Router(
        rule=Rule.quantile_exact,
        quantile_exact=schema.QuantileExact(scope=scope),
        quantile=schema.Quantile(**smoothing),
    )
    return make_rule(router, experts, k)


def observe(rule, scores, bias, k, valid=None):
    logits = torch.logit(scores.double())
    rule.observe(logits, (torch.sigmoid(logits) + bias).topk(k + 1).values[:, -1], valid)


def solve(rule, bias, tokens, k):
    """The next bias; all that the exact rules read of the loads is their sum."""
    count = torch.zeros(len(bias)).long()
    count[0] = tokens * k
    return rule.next_bias(bias, rule.bounds(bias), count, rule.statistics())


@pytest.mark.parametrize("scope", Scope)
def test_exact_rule_on_the_worked_example(scope):
    rule, bias = exact_rule(4, 1, scope), torch.zeros(4)
    observe(rule, SCORES, bias, 1)
    found = solve(rule, bias, 8, 1)
    torch.testing.assert_close(found, torch.tensor([-0.23475, -0.02575, 0.07425, 0.18625]), atol=1e-6, rtol=0)
    assert loads(SCORES, found.double() - 1e-7 * torch.arange(4), 1) == [2, 2, 2, 2]


@settings(max_examples=30)
@given(
    tokens=st.integers(1, 120),
    experts=st.integers(2, 12),
    seed=st.integers(0, 10_000),
    parts=st.integers(1, 5),
    padding=st.integers(0, 10),
)
def test_exact_rule_is_the_quantile_of_the_pool_however_it_is_cut(tokens, experts, seed, parts, padding):
    k = 1 + seed % (experts - 1) if experts > 2 else 1
    scores, bias = random_scores(tokens + padding, experts, seed), torch.randn(experts) * 0.2
    valid = torch.randperm(tokens + padding) < tokens
    rule = exact_rule(experts, k)
    for index in torch.arange(len(scores)).tensor_split(parts):
        observe(rule, scores[index], bias, k, valid[index])
    wanted = torch.sigmoid(torch.logit(scores.double())).float()[valid]
    sorted_margins = margins(wanted, bias, k).sort(0).values
    quantile = sorted_margins[tokens * k // experts].double()
    found = solve(rule, bias, tokens, k)
    torch.testing.assert_close(found.double(), quantile - quantile.mean(), atol=2e-6, rtol=0)
    rule.reset()
    assert torch.equal(solve(rule, bias, 0, k), bias)


def test_micro_batch_quantiles_are_averaged_by_tokens_and_differ_from_the_pool():
    scores, bias = random_scores(90, 6, 3), torch.zeros(6)
    pooled, cut = exact_rule(6, 2), exact_rule(6, 2, Scope.micro_batch)
    each = []
    for part in (scores[:30], scores[30:]):
        observe(pooled, part, bias, 2)
        observe(cut, part, bias, 2)
        each.append(margins(part, bias, 2).sort(0).values[len(part) // 3])
    mean = (30 * each[0] + 60 * each[1]) / 90
    found = solve(cut, bias, 90, 2)
    torch.testing.assert_close(found, mean - mean.mean(), atol=1e-6, rtol=0)
    assert (found - solve(pooled, bias, 90, 2)).abs().max() > 1e-3
    cut.reset()
    assert torch.equal(solve(cut, bias, 0, 2), bias)


def test_histogram_and_exact_rule_agree_within_a_bin():
    scores, bias = random_scores(20_000, 12, 6), torch.zeros(12)
    router = schema.Router(quantile=schema.Quantile(bins=2000))
    histogram, exact = make_rule(router, 12, 3), exact_rule(12, 3)
    from k3train.router.select import count_margins

    cutoff = (scores + bias).topk(4).values[:, -1]
    count_margins(scores, cutoff, None, histogram.bounds(bias), histogram.histogram)
    observe(exact, scores, bias, 3)
    gap = solve(histogram, bias, 20_000, 3) - solve(exact, bias, 20_000, 3)
    assert gap.abs().max() < 2 / 2000 * 2


def test_sign_rule_steps_toward_the_mean_load():
    rule = make_rule(schema.Router(rule=Rule.sign, sign=schema.SignBias(rate=0.25)), 4, 1)
    bias = torch.tensor([0.5, 0.0, 0.0, -0.5])
    next_bias = rule.next_bias(bias, rule.bounds(bias), torch.tensor([6, 4, 3, 3]), NOTHING)
    assert next_bias.tolist() == [0.25, 0.0, 0.25, -0.25]
    huge = torch.tensor([2**50 + 1, 2**50, 2**50, 2**50 - 1])
    assert (rule.next_bias(bias, rule.bounds(bias), huge, NOTHING) - bias).tolist() == [-0.25, 0, 0, 0.25]
    nothing = torch.zeros(4).long()
    assert torch.equal(rule.next_bias(bias, rule.bounds(bias), nothing, NOTHING), bias)


def switch_loss(weight, x, over_mean, valid, coefficient):
    """coefficient * E * sum_j f_j P_j, summed over valid tokens, as a plain formula."""
    scores = torch.sigmoid(x @ weight.T)
    share = scores / scores.sum(-1, keepdim=True)
    return coefficient * (share[valid] @ over_mean).sum()


@pytest.mark.parametrize("scope", Scope)
def test_auxiliary_loss_adds_its_gradient_to_the_routers_and_nothing_else(scope):
    router = make_router(rule=Rule.aux_loss, aux_loss=schema.AuxLoss(coefficient=0.3, scope=scope)).double()
    x = torch.randn(50, 16, dtype=torch.float64)
    valid = torch.arange(50) < 41
    for step in range(2):
        router.weight.grad = None
        direction = torch.randn(50, 2, dtype=torch.float64)
        routes = router(x, valid)
        (routes.weights * direction).sum().backward()
        counts = torch.bincount(routes.experts[valid].flatten(), minlength=8).double()
        weight = router.weight.detach().clone().requires_grad_()
        chosen = torch.sigmoid(x @ weight.T).gather(1, routes.experts)
        main = (chosen / chosen.sum(1, keepdim=True) * direction).sum()
        over_mean = counts / counts.mean()
        if scope is Scope.global_batch and step == 0:
            over_mean = torch.ones(8, dtype=torch.float64)  # nothing is known yet: no gradient
        aux = switch_loss(weight, x, over_mean, valid, 0.3)
        (main + aux).backward()
        torch.testing.assert_close(router.weight.grad, weight.grad, atol=1e-6, rtol=1e-5)
        assert torch.autograd.grad(switch_loss(weight, x, over_mean, valid, 0.3), weight)[0].abs().max() < (
            1e-12 if scope is Scope.global_batch and step == 0 else 10
        )
        assert torch.equal(router.bias, torch.zeros(8).double())
        update_biases([router])


def test_auxiliary_loss_balances_a_trained_router():
    router = make_router(rule=Rule.aux_loss, aux_loss=schema.AuxLoss(coefficient=1.0))
    x = torch.randn(400, 16)
    x[:, 0] = 1
    with torch.no_grad():
        router.weight[:, 0] = torch.linspace(-1.5, 1.5, 8)
    optimizer, violations = torch.optim.SGD([router.weight], lr=0.02), []
    for _ in range(40):
        optimizer.zero_grad()
        (router(x).weights * 0).sum().backward()
        violations.append(update_biases([router])[1]["max_violation"])
        optimizer.step()
    assert violations[-1] < 0.5 * violations[0]


def test_average_is_a_mean_at_first_and_then_forgets():
    smooth, seen = Smooth(2, window=3, strength=1.0), torch.tensor(True)
    solutions = torch.tensor([[1.0, -1.0], [2.0, -2.0], [6.0, -6.0], [0.0, 0.0]], dtype=torch.float64)
    bias, found = torch.zeros(2), []
    for solution in solutions:
        bias = smooth(bias, solution, seen)
        found.append(float(bias[0]))
    assert found == pytest.approx([1.0, 1.5, 3.0, 2.0])
    before = smooth.average.clone()
    assert torch.equal(smooth(bias, solutions[0], torch.tensor(False)), bias)
    assert torch.equal(smooth.average, before)
    assert int(smooth.averaged) == 3


def test_strength_moves_part_of_the_way():
    smooth = Smooth(2, window=1, strength=0.25)
    bias = smooth(torch.tensor([1.0, -1.0]), torch.tensor([5.0, -5.0]).double(), torch.tensor(True))
    assert bias.tolist() == [2.0, -2.0]
    assert dict(smooth.named_buffers()) == {}


def test_what_a_rule_remembers_is_in_checkpoints():
    plain = {"weight", "bias", "bounds"}
    for rule in Rule:
        more = {"rule.over_mean"} if rule is Rule.aux_loss else set()
        assert set(make_router(rule=rule).state_dict()) == plain | more
    averaging = make_router(quantile=schema.Quantile(window=4))
    assert set(averaging.state_dict()) == plain | {"rule.smooth.average", "rule.smooth.averaged"}


def test_averaging_router_goes_on_where_its_checkpoint_was():
    quantile = schema.Quantile(window=4, strength=0.5)
    one, two = (make_router(quantile=quantile) for _ in range(2))
    batches = torch.randn(5, 200, 16)
    for x in batches[:3]:
        one(x)
        update_biases([one])
    two.load_state_dict(one.state_dict())
    for x in batches[3:]:
        for router in (one, two):
            router(x)
            update_biases([router])
    assert torch.equal(one.bias, two.bias)


@pytest.mark.parametrize("rule", Rule)
def test_every_rule_keeps_its_state_over_a_skipped_step_and_over_one_of_padding(rule):
    router, other = (make_router(rule=rule, quantile=schema.Quantile(window=3)) for _ in range(2))
    good, bad = torch.randn(200, 16), torch.randn(200, 16) + 3
    for one in (router, other):
        one(good)
        update_biases([one])
    before = {name: value.clone() for name, value in router.state_dict().items()}
    router(bad)
    start_update([router]).discard()
    assert all(torch.equal(value, before[name]) for name, value in router.state_dict().items())
    router(bad, torch.zeros(200, dtype=torch.bool))
    assert update_biases([router])[1]["tokens"] == 0
    assert all(torch.equal(value, before[name]) for name, value in router.state_dict().items())
    for one in (router, other):
        one(good)
        update_biases([one])
    assert torch.equal(router.bias, other.bias)


def test_metrics_name_what_went_wrong():
    router = make_router()
    with torch.no_grad():
        router.weight[5] = -5
        x = torch.randn(1000, 16).abs()
    router(x)
    first = update_biases([router])[1]
    assert first["dead_experts"] >= 1
    assert first["causal_lag"] > 0.3
    assert first["bias_drift"] == pytest.approx(float(router.bias.abs().max()))
    router(x)
    second = update_biases([router])[1]
    assert second["causal_lag"] < 0.5 * first["causal_lag"]
    assert second["dead_experts"] == 0
    assert second["saturated_experts"] == 0


def test_causal_lag_is_zero_for_independent_tokens_and_shows_a_shift():
    router, shift = make_router(experts=16, top_k=4), torch.randn(16)
    lags = []
    for step in range(8):
        x = torch.randn(4000, 16) + (shift if step == 7 else 0)
        router(x)
        lags.append(update_biases([router])[1]["causal_lag"])
    assert max(lags[4:7]) < 0.02
    assert lags[7] > 0.1


def test_audit_compares_with_the_exact_quantile_and_the_batch_s_own_bias():
    router, x = make_router(experts=16, top_k=4), torch.randn(3000, 16)
    router.audit = Audit(4)
    valid = torch.arange(3000) % 7 > 0
    router(x[:1000], valid[:1000])
    router(x[1000:], valid[1000:])
    scores = torch.sigmoid(x @ router.weight.T)[valid]
    exact = margins(scores, router.bias, 4).sort(0).values[len(scores) * 4 // 16]
    numbers = update_biases([router])[1]
    want = (exact - exact.mean() - router.bias).abs().max()
    assert numbers["exact_error"] == pytest.approx(float(want), abs=1e-6)
    assert 0 < numbers["exact_error"] < 2 * 2 / 1000 + 1e-6
    counts = torch.bincount((scores + router.bias).topk(4).indices.flatten(), minlength=16)
    assert numbers["own_violation"] == pytest.approx(float(counts.max() / counts.double().mean()) - 1)
    assert router.audit is None
    assert math.isclose(numbers["tokens"], len(scores))
