"""The chunked path against the token recurrence: values, gradients, documents, states and hard regimes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from k3train.kernels.kda.choose import kda
from k3train.kernels.kda.chunked import kda_chunked
from k3train.kernels.kda.reference import bounded_gate, kda_reference
from k3train.kernels.packing import Packing, make_packing

BOUND = -5.0
NAMES = ("q", "k", "v", "z", "beta", "A_log", "dt_bias", "initial_state")
REGIMES = ("random", "saturated", "slow", "alternating", "channels", "correlated")
RAGGED = (0, 1, 2, 5, 64, 65, 130, 131, 133, 200)


def draw(regime: str, t: int, *, b: int = 1, h: int = 2, d: int = 16) -> list[Tensor]:
    """float64 inputs: q, k, v, z, beta, A_log, dt_bias."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    q, k, v, z, beta = (
        normal(b, t, h, d),
        normal(b, t, h, d),
        normal(b, t, h, d),
        normal(b, t, h, d),
        normal(b, t, h),
    )
    token, channel = torch.arange(t)[:, None, None] % 2 == 0, torch.arange(d) % 2 == 0
    if regime == "saturated":
        z = z * 0.3 + 8
    elif regime == "slow":
        z = z * 0.5 - 8
    elif regime == "alternating":
        z = z + torch.where(token, 9.0, -9.0)
    elif regime == "channels":
        z = z + torch.where(channel, 9.0, -9.0)
    elif regime == "correlated":  # nearly equal keys, hardly any decay, beta near one: the worst inverse
        k, z, beta = k * 0.05 + normal(1, 1, h, d), z * 0.5 - 9, beta * 0.3 + 4
    return [q, k, v, z, beta, normal(h) * 0.2, normal(h * d) * 0.3]


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()


def leaves(inputs: Sequence[Tensor], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [x.detach().to(dtype).requires_grad_() for x in inputs]


def packed(borders: Sequence[int]) -> Packing:
    return make_packing(list(borders), torch.ones(borders[-1], dtype=torch.bool))


def backward(
    o: Tensor, state: Tensor | None, inputs: list[Tensor], do: Tensor, dstate: Tensor | None
) -> list[Tensor]:
    loss = (o * do.to(o.dtype)).sum()
    if state is not None and dstate is not None:
        loss = loss + (state * dstate.to(state.dtype)).sum()
    return list(torch.autograd.grad(loss, inputs))


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["fp64", "fp32"]
)
def test_chunked_equals_recurrence_with_states(regime: str, dtype: torch.dtype, tolerance: float) -> None:
    """Two rows of 150 tokens, an initial state and a gradient for the final one."""
    inputs = [*draw(regime, 150, b=2), torch.randn(2, 2, 16, 16, dtype=torch.float64)]
    exact = leaves(inputs)
    o, S = kda_reference(*exact[:7], gate_lower_bound=BOUND, initial_state=exact[7])
    do, dS = torch.randn_like(o), torch.randn_like(S)
    expected = backward(o, S, exact, do, dS)
    mine = leaves(inputs, dtype)
    o2, S2 = kda(*mine[:7], gate_lower_bound=BOUND, initial_state=mine[7], output_final_state=True)
    assert S2 is not None
    assert o2.dtype == dtype
    assert relative(o2, o) < tolerance
    assert relative(S2, S) < tolerance
    for name, got, want in zip(NAMES, backward(o2, S2, mine, do, dS), expected, strict=True):
        assert got.isfinite().all(), name
        # gradients of saturated gates are small differences of large terms
        loose = 20 if name in ("z", "A_log", "dt_bias") else 1
        assert relative(got, want) < loose * tolerance, name


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
def test_ragged_documents_equal_recurrence(regime: str, dtype: torch.dtype) -> None:
    """Documents of 1, 2 and 3 tokens and borders on, before and after the borders of tiles and chunks."""
    inputs = draw(regime, RAGGED[-1])
    exact, mine = leaves(inputs), leaves(inputs, dtype)
    o, _ = kda_reference(*exact, gate_lower_bound=BOUND, cu_seqlens=RAGGED)
    do = torch.randn_like(o)
    expected = backward(o, None, exact, do, None)
    o2, none = kda(*mine, gate_lower_bound=BOUND, packing=packed(RAGGED))
    assert none is None
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert relative(o2, o) < tolerance
    for name, got, want in zip(NAMES, backward(o2, None, mine, do, None), expected, strict=False):
        loose = 20 if name in ("z", "A_log", "dt_bias") else 1
        assert relative(got, want) < loose * tolerance, name


@pytest.mark.parametrize("seed", range(6))
def test_random_borders_equal_recurrence(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    t = int(torch.randint(1, 180, (1,), generator=generator))
    share = (0.02, 0.1, 0.5)[seed % 3]
    borders = [0, *(i for i in range(1, t) if torch.rand((), generator=generator) < share), t]
    inputs = draw("slow", t, h=1, d=4)
    exact, mine = leaves(inputs), leaves(inputs)
    o, _ = kda_reference(*exact, gate_lower_bound=BOUND, cu_seqlens=borders)
    o2, _ = kda(*mine, gate_lower_bound=BOUND, packing=packed(borders))
    do = torch.randn_like(o)
    torch.testing.assert_close(o2, o, rtol=1e-11, atol=1e-12)
    for got, want in zip(backward(o2, None, mine, do, None), backward(o, None, exact, do, None), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("changed", [0, 2, 4])
def test_documents_cannot_see_each_other(changed: int) -> None:
    """With slow decay, where a leak would be loud: other documents' results do not move by one bit."""
    borders = (0, 20, 23, 90, 128, 170)
    inputs = [x.float() for x in draw("slow", borders[-1])]
    start, stop = borders[changed], borders[changed + 1]
    others = torch.ones(borders[-1], dtype=torch.bool)
    others[start:stop] = False
    do = torch.randn(1, borders[-1], 2, 16)

    def run(tokens: list[Tensor], grad: Tensor) -> list[Tensor]:
        x = leaves(tokens, torch.float32)
        o, _ = kda(*x, gate_lower_bound=BOUND, packing=packed(borders))
        return [o, *backward(o, None, x, grad, None)[:5]]

    before = run(inputs, do)
    disturbed = [x.clone() for x in inputs]
    for x in disturbed[:5]:
        x[:, start:stop] = 7 * torch.randn_like(x[:, start:stop])
    do2 = do.clone()
    do2[:, start:stop] = 3.0
    after = run(disturbed, do2)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[:, others], b[:, others])
        assert not torch.equal(a[:, ~others], b[:, ~others])


def test_packed_equals_separate() -> None:
    inputs = draw("slow", RAGGED[-1])
    o, _ = kda(*inputs, gate_lower_bound=BOUND, packing=packed(RAGGED))
    for start, stop in pairwise(RAGGED):
        alone, _ = kda(*(x[:, start:stop] for x in inputs[:5]), *inputs[5:], gate_lower_bound=BOUND)
        torch.testing.assert_close(o[:, start:stop], alone, rtol=1e-12, atol=1e-13)


def test_states_of_packed_documents() -> None:
    borders = (0, 3, 70, 71, 150)
    inputs = [*draw("slow", borders[-1]), torch.randn(4, 2, 16, 16, dtype=torch.float64)]
    exact, mine = leaves(inputs), leaves(inputs)
    o, S = kda_reference(*exact[:7], gate_lower_bound=BOUND, cu_seqlens=borders, initial_state=exact[7])
    o2, S2 = kda(
        *mine[:7],
        gate_lower_bound=BOUND,
        packing=packed(borders),
        initial_state=mine[7],
        output_final_state=True,
    )
    assert S2 is not None
    torch.testing.assert_close(o2, o)
    torch.testing.assert_close(S2, S)
    do, dS = torch.randn_like(o), torch.randn_like(S)
    for got, want in zip(backward(o2, S2, mine, do, dS), backward(o, S, exact, do, dS), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


def test_states_chain() -> None:
    """A document in two pieces, the second from the first's final state, equals the document in one."""
    inputs = draw("random", 140)
    whole, last = kda(*inputs, gate_lower_bound=BOUND, output_final_state=True)
    first, state = kda(
        *(x[:, :77] for x in inputs[:5]), *inputs[5:], gate_lower_bound=BOUND, output_final_state=True
    )
    second, end = kda(
        *(x[:, 77:] for x in inputs[:5]),
        *inputs[5:],
        gate_lower_bound=BOUND,
        initial_state=state,
        output_final_state=True,
    )
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-12, atol=1e-13)
    assert end is not None
    torch.testing.assert_close(end, last, rtol=1e-12, atol=1e-13)


def test_future_does_not_leak() -> None:
    inputs = draw("slow", 130)
    before, _ = kda(*inputs, gate_lower_bound=BOUND)
    for x in inputs[:5]:
        x[:, 75:] = 9 * torch.randn_like(x[:, 75:])
    after, _ = kda(*inputs, gate_lower_bound=BOUND)
    assert torch.equal(before[:, :75], after[:, :75])


@pytest.mark.parametrize("regime", ["random", "saturated", "slow"])
def test_bf16_inputs(regime: str) -> None:
    """bf16 inputs, fp32 inside: only the rounding of results and gradients to bf16 remains."""
    inputs = draw(regime, 150)
    mine = leaves(inputs[:5], torch.bfloat16) + leaves(inputs[5:], torch.float32)
    exact = leaves([x.detach() for x in mine])
    o, _ = kda_reference(*exact, gate_lower_bound=BOUND)
    o2, S2 = kda(*mine, gate_lower_bound=BOUND, output_final_state=True)
    assert S2 is not None
    assert (o2.dtype, S2.dtype) == (torch.bfloat16, torch.float32)
    do = torch.randn_like(o).bfloat16().double()
    assert relative(o2, o) < 4e-3
    for name, got, want in zip(
        NAMES, backward(o2, None, mine, do, None), backward(o, None, exact, do, None), strict=False
    ):
        assert relative(got, want) < 4e-3, name


def test_always_at_the_lower_bound() -> None:
    """g = -5 in fp32 for every token and channel: nothing overflows and nothing is lost."""
    inputs = [x.float() for x in draw("random", 200)]
    inputs[3] = torch.full_like(inputs[3], 1e4)
    exact, mine = leaves(inputs), leaves(inputs, torch.float32)
    o, _ = kda_reference(*exact, gate_lower_bound=BOUND)
    o2, _ = kda(*mine, gate_lower_bound=BOUND)
    do = torch.randn_like(o)
    assert relative(o2, o) < 1e-6
    for got, want in zip(backward(o2, None, mine, do, None), backward(o, None, exact, do, None), strict=True):
        assert got.isfinite().all()
        assert (got.double() - want).norm() < 1e-5 * (1 + want.norm())


def test_gate_vectors() -> None:
    """Values of the k3 report's gate at chosen (A_log, z)."""
    cases = [
        (0.0, -8.0, -0.001677),
        (0.0, -3.0, -0.237129),
        (0.0, 0.0, -2.5),
        (0.0, 3.0, -4.762871),
        (math.log(2), 1.0, -4.403985),
        (math.log(16), -0.5, -0.001677),
    ]
    for a, z, expected in cases:
        for bias in (0.0, 0.75):
            got = bounded_gate(torch.tensor([[z - bias]]), torch.tensor([a]), torch.tensor([bias]), BOUND)
            assert got.item() == pytest.approx(expected, abs=1e-6)


def test_group_size_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks worked on one at a time give what all at once give."""
    inputs = draw("random", 300)
    mine, again = leaves(inputs), leaves(inputs)
    o, _ = kda(*mine, gate_lower_bound=BOUND, packing=packed((0, 90, 300)))
    monkeypatch.setattr("k3train.kernels.kda.chunked._GROUP_ELEMENTS", {"cpu": 1, "cuda": 1})
    o2, _ = kda(*again, gate_lower_bound=BOUND, packing=packed((0, 90, 300)))
    torch.testing.assert_close(o2, o, rtol=1e-12, atol=1e-13)
    do = torch.randn_like(o)
    for got, want in zip(backward(o2, None, again, do, None), backward(o, None, mine, do, None), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


def test_weaker_bound_and_wide_heads() -> None:
    inputs = draw("random", 100, h=3, d=40)
    o, _ = kda_reference(*inputs, gate_lower_bound=-0.7)
    o2, _ = kda(*inputs, gate_lower_bound=-0.7)
    torch.testing.assert_close(o2, o, rtol=1e-12, atol=1e-13)


def test_refusals() -> None:
    inputs = draw("random", 10, b=2)
    with pytest.raises(ValueError, match="packed documents need"):
        kda(*inputs, gate_lower_bound=BOUND, packing=packed((0, 4, 10)))
    with pytest.raises(AssertionError):
        kda_chunked(*inputs, gate_lower_bound=-5.5)


@pytest.mark.gpu
@pytest.mark.parametrize("regime", REGIMES)
def test_gpu_equals_recurrence(regime: str) -> None:
    inputs = draw(regime, RAGGED[-1])
    exact = leaves(inputs)
    mine = [x.detach().float().cuda().requires_grad_() for x in inputs]
    o, _ = kda_reference(*exact, gate_lower_bound=BOUND, cu_seqlens=RAGGED)
    packing = make_packing(list(RAGGED), torch.ones(RAGGED[-1], dtype=torch.bool), device="cuda")
    o2, _ = kda(*mine, gate_lower_bound=BOUND, packing=packing)
    do = torch.randn_like(o)
    assert relative(o2.cpu(), o) < 1e-5
    expected = backward(o, None, exact, do, None)
    for name, got, want in zip(NAMES, backward(o2, None, mine, do.cuda(), None), expected, strict=False):
        assert relative(got.cpu(), want) < 1e-3, name


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"v": lambda x: x[:, :20]}, "v has shape (2, 20, 2, 16): with q [b, t, h, d] = [2, 40, 2, 16] kda"),
        ({"beta": lambda x: x[..., :1]}, "beta has shape (2, 40, 1)"),
        ({"A_log": lambda x: x[:1]}, "A_log has shape (1,)"),
        ({"dt_bias": lambda x: x.view(2, 16)}, "dt_bias has shape (2, 16)"),
        ({"q": lambda x: x.flatten(2)}, "q has shape (2, 40, 32): kda needs [b, t, h, d]"),
    ],
)
def test_shapes_that_do_not_belong_together_are_refused(change, told) -> None:
    inputs = dict(zip(NAMES, draw("random", 40, b=2), strict=False))
    for name, change_one in change.items():
        inputs[name] = change_one(inputs[name])
    with pytest.raises(ValueError, match=re.escape(told)):
        kda(**inputs, gate_lower_bound=BOUND)


@pytest.mark.parametrize("bound", [-8.0, 0.0, 1.0])
def test_a_bound_that_fp32_could_not_hold_is_refused(bound: float) -> None:
    with pytest.raises(ValueError, match=f"gate_lower_bound = {bound:g} must be at least -5 and less than 0"):
        kda(*draw("random", 8), gate_lower_bound=bound)


@pytest.mark.parametrize(
    ("given", "packing"), [((2, 3, 4, 4), None), ((96,), None), ((2, 4, 4), None), ((1, 2, 4, 4), (0, 5, 9))]
)
def test_states_of_another_layout_are_refused(
    given: tuple[int, ...], packing: tuple[int, ...] | None
) -> None:
    b, h = (3, 2) if packing is None else (1, 2)
    inputs = draw("random", 9, b=b, h=h, d=4)
    ok = (b if packing is None else 2, h, 4, 4)
    places = None if packing is None else packed(packing)
    needs = re.escape(f"initial_state has shape {given}: kda needs [documents (or b), h, d, d] = {ok}")
    with pytest.raises(ValueError, match=needs):
        kda(*inputs, gate_lower_bound=BOUND, packing=places, initial_state=torch.zeros(given))
    kda(*inputs, gate_lower_bound=BOUND, packing=places, initial_state=torch.zeros(ok))


@pytest.mark.parametrize(("b", "h"), [(0, 2), (2, 0)])
def test_no_rows_or_heads(b: int, h: int) -> None:
    inputs = leaves(draw("random", 5, b=b, h=h, d=4))
    o, states = kda(*inputs, gate_lower_bound=BOUND, output_final_state=True)
    assert states is not None
    assert o.shape == inputs[2].shape
    assert states.shape == (b, h, 4, 4)
    grads = torch.autograd.grad(o.sum(), inputs)
    assert not any(grad.any() for grad in grads)
