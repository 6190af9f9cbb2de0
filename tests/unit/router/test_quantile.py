"""The quantile rule against worked numbers, the exact quantile, and every way of cutting a batch."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3train.config import schema
from k3train.router.choose import make_rule
from k3train.router.quantile import QuantileBalance
from k3train.router.select import count_margins

SCORES = torch.tensor(
    [
        [0.541, 0.641, 0.482, 0.310],
        [0.878, 0.372, 0.569, 0.171],
        [0.509, 0.330, 0.496, 0.384],
        [0.758, 0.401, 0.154, 0.347],
        [0.802, 0.405, 0.348, 0.241],
        [0.531, 0.822, 0.425, 0.187],
        [0.632, 0.431, 0.702, 0.234],
        [0.587, 0.694, 0.253, 0.516],
    ],
    dtype=torch.float64,
)


def quantile(experts, k, bins, **settings):
    return QuantileBalance(experts, k, schema.Quantile(bins=bins, **settings))


def solve(rule, bias, statistics):
    """The next bias from summed statistics; the loads are of no use to this rule."""
    return rule.next_bias(bias, rule.bounds(bias), torch.zeros(len(bias)).long(), statistics)


def loads(scores, bias, k):
    return torch.bincount((scores + bias).topk(k).indices.reshape(-1), minlength=scores.shape[1]).tolist()


def margins(scores, bias, k):
    return (scores + bias).topk(k + 1).values[:, -1:] - scores


def observe(rule, scores, bias, k, valid=None):
    cutoff = (scores + bias).topk(k + 1).values[:, -1]
    count_margins(scores, cutoff, valid, rule.bounds(bias), rule.histogram)


def balanced(scores, bias, k, bins=1000, parts=None, valid=None):
    """The rule's next bias when the batch comes in micro-batches of ``parts`` tokens."""
    rule = quantile(scores.shape[1], k, bins)
    for index in torch.arange(len(scores)).split(parts or len(scores)):
        observe(rule, scores[index], bias, k, None if valid is None else valid[index])
    return solve(rule, bias, rule.statistics())


def test_worked_example_by_the_exact_quantile():
    bias = torch.zeros(4, dtype=torch.float64)
    assert loads(SCORES, bias, 1) == [4, 3, 1, 0]
    exact = margins(SCORES, bias, 1).sort(0).values[2]  # q = 2: the third smallest
    torch.testing.assert_close(
        exact, torch.tensor([-0.309, -0.100, 0.0, 0.112], dtype=torch.float64), atol=1e-9, rtol=0
    )
    assert loads(SCORES, exact - exact.mean(), 1) == [2, 2, 2, 2]


def test_worked_example_by_the_histogram():
    bias = torch.zeros(4)
    found = balanced(SCORES, bias, 1)
    expected = torch.tensor([-0.356, -0.106, 0.001, 0.072])
    expected -= expected.mean()
    torch.testing.assert_close(found, expected, atol=6e-4, rtol=0)
    # With 8 tokens it is visible that the histogram stops at the ceil(q)-th margin, not at the (q+1)-th:
    # loads (1, 2, 3, 2). Its last token ties experts 1 and 3 (.694 - .106 = .516 + .072): rounding decides.
    assert loads(SCORES, found.double(), 1) in ([1, 2, 3, 2], [1, 3, 3, 1])
    assert loads(SCORES, -found.double(), 1) == [7, 1, 0, 0]


def random_scores(tokens, experts, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.sigmoid(torch.randn(tokens, experts, generator=g) + torch.randn(experts, generator=g))


@settings(max_examples=40)
@given(
    tokens=st.integers(1, 200),
    experts=st.integers(2, 24),
    bins=st.integers(50, 1000),
    seed=st.integers(0, 10_000),
    data=st.data(),
)
def test_bias_lies_within_a_bin_of_the_exact_quantile(tokens, experts, bins, seed, data):
    k = data.draw(st.integers(1, experts - 1))
    scores = random_scores(tokens, experts, seed)
    bias = torch.randn(experts, generator=torch.Generator().manual_seed(seed)) * 0.2
    rule = quantile(experts, k, bins)
    observe(rule, scores, bias, k)
    assert (rule.histogram.sum(-1) == tokens).all()
    low, high = rule.bounds(bias).double()
    width = float(high - low) / bins
    rank = math.ceil(tokens * k / experts)
    exact = margins(scores, bias, k).double().sort(0).values[rank - 1]
    centred = solve(rule, bias, rule.statistics()).double()
    # Centring hides one constant: compare differences between experts, which may be off by a bin each.
    gap = (centred - centred[0]) - (exact - exact[0])
    assert gap.abs().max() <= 2 * width + 1e-6
    assert abs(centred.mean()) < 1e-6


@settings(max_examples=40)
@given(
    tokens=st.integers(2, 300),
    experts=st.integers(2, 16),
    seed=st.integers(0, 10_000),
    cuts=st.lists(st.integers(0, 300), max_size=6),
    ranks=st.integers(1, 4),
)
def test_bias_does_not_depend_on_the_partition(tokens, experts, seed, cuts, ranks):
    k = 1 + seed % (experts - 1) if experts > 2 else 1
    scores = random_scores(tokens, experts, seed)
    bias = torch.randn(experts, generator=torch.Generator().manual_seed(seed)) * 0.1
    whole = balanced(scores, bias, k)
    borders = [0, *sorted(min(c, tokens) for c in cuts), tokens]
    rules = [quantile(experts, k, 1000) for _ in range(ranks)]
    for index, (start, stop) in enumerate(itertools.pairwise(borders)):
        observe(rules[index % ranks], scores[start:stop], bias, k)
    summed = torch.stack([rule.statistics() for rule in rules]).sum(0)
    assert torch.equal(solve(rules[0], bias, summed), whole)


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), padding=st.integers(1, 60))
def test_invalid_tokens_leave_no_trace(seed, padding):
    scores, bias = random_scores(90, 8, seed), torch.zeros(8)
    valid = torch.ones(90, dtype=torch.bool)
    valid[torch.randperm(90, generator=torch.Generator().manual_seed(seed))[:padding]] = False
    assert torch.equal(balanced(scores, bias, 2, valid=valid), balanced(scores[valid], bias, 2))


def test_step_of_padding_alone_keeps_the_bias():
    bias = torch.tensor([0.25, -0.5, 0.25, 0.0])
    nothing = torch.zeros(8, dtype=torch.bool)
    assert torch.equal(balanced(SCORES.float(), bias, 1, valid=nothing), bias)


@pytest.mark.parametrize("times", [2**28, 2**40])
def test_counts_beyond_32_bits(times):
    """Every count multiplied by one number leaves every quantile where it was, up to the rounding of q."""
    scores, bias = random_scores(512, 8, 5), torch.zeros(8)
    rule = quantile(8, 2, 1000)
    observe(rule, scores, bias, 2)
    once = solve(rule, bias, rule.statistics())
    many = solve(rule, bias, rule.statistics() * times)
    assert int((rule.statistics() * times).sum(-1)[0]) == 512 * times
    torch.testing.assert_close(many, once, atol=1e-7, rtol=0)


def test_large_counts_keep_single_tokens_apart():
    """q = 2^24 + 1 tokens: in fp32 the last of them would vanish and the next bin be missed."""
    rule = quantile(2, 1, 4)
    q = 2**24 + 1
    statistics = torch.tensor([[q - 1, 1, 0, q], [q, 0, 0, q]])
    bias = torch.zeros(2)
    found = solve(rule, bias, statistics)
    # First row ends in bin 1 (from -0.5), filled: 0. Second row fills bin 0: -0.5.
    torch.testing.assert_close(found, torch.tensor([0.25, -0.25]), atol=1e-6, rtol=0)


def test_margins_at_the_ends_of_the_bounds_are_counted():
    rule = quantile(2, 1, 10)
    scores = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    count_margins(scores, torch.tensor([1.0, 0.0]), None, torch.tensor([-1.0, 1.0]), rule.histogram)
    assert rule.histogram.sum(-1).tolist() == [2, 2]
    assert rule.histogram[1, -1] == 1


def test_chosen_range_cuts_the_margins_and_says_so():
    scores, bias = random_scores(400, 8, 4), torch.zeros(8)
    wide, narrow = quantile(8, 2, 4000), quantile(8, 2, 1000, range=0.05)
    for rule in (wide, narrow):
        observe(rule, scores, bias, 2)
    assert narrow.bounds(bias).tolist() == pytest.approx([-0.05, 0.05])
    assert (narrow.statistics().sum(-1) == 400).all()
    exact = margins(scores, bias, 2).sort(0).values[99]  # q = 100
    outside = int((exact.abs() >= 0.05).sum())
    assert 0 < outside < 8
    assert int(narrow.saturated(bias.long(), narrow.statistics())) == outside
    assert int(wide.saturated(bias.long(), wide.statistics())) == 0


def test_finer_bins_come_closer():
    scores, bias = random_scores(5000, 16, 8), torch.zeros(16)
    exact = margins(scores, bias, 4).double().sort(0).values[1250]
    gaps = [
        float((balanced(scores, bias, 4, bins).double() - (exact - exact.mean())).abs().max())
        for bins in (16, 64, 256, 1024, 4096)
    ]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 1e-3 < gaps[0]


@pytest.mark.parametrize("rule", [schema.RouterRule.quantile, schema.RouterRule.quantile_exact])
def test_needs_an_expert_that_is_not_chosen(rule):
    with pytest.raises(ValueError, match=r"top_k=4 .* must be less than model\.moe\.num_experts=4"):
        make_rule(schema.Router(rule=rule), 4, 4)
