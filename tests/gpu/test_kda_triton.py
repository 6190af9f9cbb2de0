"""The Hopper KDA kernels against the token recurrence in float64, on a device that can run them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.gpu import kda_stages as stages
from tests.gpu import run_kda as run

NAMES = ("o", *run.NAMES)

pytestmark = [pytest.mark.gpu]


def check(got: list[torch.Tensor], want: list[torch.Tensor], x: list[torch.Tensor]) -> None:
    """Relative errors of o and the gradients of x; dA_log is a sum near zero, so its terms count as well."""
    for name, a, b in zip(NAMES, got, want, strict=True):
        if name == "dA_log":
            terms = want[4] * (x[3].detach().double() + x[6].detach().double().view(x[3].shape[2:]))
            assert (a.double() - b).norm() < 1e-2 * b.norm() + 3e-2 * terms.norm(), name
        else:
            assert run.relative(a, b) < 1e-2, name


@pytest.fixture(autouse=True)
def _available() -> None:
    from k3train.kernels.kda.triton_kda import is_available

    works, reason = is_available("cuda", torch.bfloat16, 128, run.BOUND)
    if not works:
        pytest.skip(reason)


@pytest.mark.parametrize("regime", run.REGIMES)
def test_stages(regime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What every kernel writes for one document of 200 tokens, against the same algebra in float64."""
    import k3train.kernels.kda.triton_kda as kda

    t, h, d = 200, 2, 128
    q, k, v, z, beta, *vectors = (y.detach() for y in run.make(1, t, h, regime))
    inputs = (*(y[0].contiguous() for y in (q, k, v, z, beta)), *vectors)
    do = torch.randn(t, h, d, device="cuda").to(torch.bfloat16)
    s0, ds = torch.randn(2, 1, h, d, d, device="cuda")
    wide = (y.double() for y in (*inputs, do))
    want = stages.run(*wide, run.BOUND, s0[0].double(), ds[0].double(), stages.bf16)
    call = kda._Call((0, t), h, kda.Ends(enters="all"), None, run.BOUND, do.device)
    tiles = kda._operands(inputs, call)
    got = {name: tiles[name].transpose(0, 1) for name in kda.KEPT["operands"] if name != "rs"}
    o, final = kda._Kda.apply(*inputs, s0, call, True)
    inner = kda._input_gradients

    def spy(inputs, o, do, us, dv, hs, dhs, rs, call):
        got.update({name: y.transpose(0, 1) for name, y in {"U": us, "hs": hs, "dhs": dhs}.items()})
        return inner(inputs, o, do, us, dv, hs, dhs, rs, call)

    monkeypatch.setattr(kda, "_input_gradients", spy)
    grads = kda._backward(inputs, s0, o, (s0, None, None), {}, do, ds.contiguous(), call)
    got |= dict(zip((*run.NAMES, "dinitial"), grads, strict=True), o=o, final=final)
    got |= {name: got[name][0] for name in ("final", "dinitial")}
    errors = {name: run.relative(y, want[name]) for name, y in got.items()}
    print(" ".join(f"{name} {e:.1e}" for name, e in errors.items()))
    assert all(e < 3e-2 if name == "dA_log" else e < 1e-2 for name, e in errors.items()), errors


@pytest.mark.parametrize("regime", run.REGIMES)
@pytest.mark.parametrize(("longest", "size"), [(16, 1), (50, 1), (1 << 20, 2), (20, 4)])
def test_long_document_cut_or_shared_equals_itself(regime: str, longest: int, size: int) -> None:
    t, h = 8192, 2
    x = run.make(1, t, h, regime)
    do = torch.randn(1, t, h, 128, device="cuda").to(torch.bfloat16)
    with run.cut_into(1 << 20):
        o, _, g = run.gradients(run.ours, x, do)
    with run.cut_into(longest):
        o2, _, g2 = run.shards(x, do, (0, t), size) if size > 1 else run.gradients(run.ours, x, do)
    check([o2, *g2], [o.double(), *(y.double() for y in g)], x)


@pytest.mark.parametrize("regime", run.REGIMES)
@pytest.mark.parametrize("borders", [None, run.DOCUMENTS], ids=["one", "packed"])
@pytest.mark.parametrize("heads", [1, 3, 16])
def test_output_and_gradients(regime: str, borders: tuple[int, ...] | None, heads: int) -> None:
    x = run.make(1, 512, heads, regime, seed=heads)
    do = torch.randn(1, 512, heads, 128, device="cuda").to(torch.bfloat16)
    o, _, g = run.gradients(run.ours, x, do, borders=borders)
    again = run.gradients(run.ours, x, do, borders=borders)
    want, want_g = run.reference(x, do, borders or (0, 512))
    check([o, *g], [want, *want_g], x)
    assert torch.equal(o, again[0])
    assert all(torch.equal(a, b) for a, b in zip(g, again[2], strict=True))


CROSSING = (0, 30, 250, 251, 512)


@pytest.mark.parametrize("regime", run.REGIMES)
@pytest.mark.parametrize(
    ("borders", "longest", "size"),
    [((0, 512), 2, 1), (run.DOCUMENTS, 1, 1), ((0, 512), 9, 4), (CROSSING, 1, 4), (run.DOCUMENTS, 9, 2)],
)
def test_segments_and_shards(regime: str, borders: tuple[int, ...], longest: int, size: int) -> None:
    """Documents cut into segments of ``longest`` chunks, in ``size`` shards of one context-parallel group."""
    x = run.make(1, 512, 3, regime, seed=longest)
    do = torch.randn(1, 512, 3, 128, device="cuda").to(torch.bfloat16)

    def compute():
        with run.cut_into(longest):
            if size > 1:
                return run.shards(x, do, borders, size)
            return run.gradients(run.ours, x, do, borders=borders)

    (o, _, g), again = compute(), compute()
    want, want_g = run.reference(x, do, borders)
    check([o, *g], [want, *want_g], x)
    assert torch.equal(o, again[0])
    assert all(torch.equal(a, b) for a, b in zip(g, again[2], strict=True))


@pytest.mark.parametrize("keep", ["scores", "operands"])
def test_what_is_kept_changes_nothing(keep: str) -> None:
    x = run.make(1, 330, 2, "slow")
    do = torch.randn(1, 330, 2, 128, device="cuda").to(torch.bfloat16)
    with run.cut_into(2):
        o, _, g = run.gradients(run.ours, x, do)
        kept, _, kept_g = run.gradients(run.ours, x, do, keep=keep)
    assert all(torch.equal(a, b) for a, b in zip((o, *g), (kept, *kept_g), strict=True))


def test_states_in_and_out_join_two_calls() -> None:
    x = [y.detach() for y in run.make(1, 320, 4, "mixed")]
    whole, final = run.ours(*x, output_final_state=True)
    first = [y[:, :192] for y in x[:5]]
    second = [y[:, 192:] for y in x[:5]]
    a, state = run.ours(*first, *x[5:], output_final_state=True)
    b, last = run.ours(*second, *x[5:], initial_state=state, output_final_state=True)
    assert torch.equal(torch.cat([a, b], 1), whole)
    assert torch.equal(last, final)


def test_later_tokens_do_not_change_earlier_outputs() -> None:
    x = [y.detach() for y in run.make(1, 256, 2, "mixed")]
    before, _ = run.ours(*x)
    for i in range(5):
        y = list(x)
        y[i] = y[i].clone()
        y[i][:, 100:] = 8.0
        after, _ = run.ours(*y)
        assert torch.equal(before[:, :100], after[:, :100])


def test_documents_do_not_see_each_other() -> None:
    borders = (0, 70, 71, 200)
    x = [y.detach() for y in run.make(1, 200, 2, "mixed")]
    whole, _ = run.ours(*x, borders=borders)
    x[2] = x[2].clone()
    x[2][:, 71:] = float("nan")
    poisoned, _ = run.ours(*x, borders=borders)
    assert torch.equal(whole[:, :71], poisoned[:, :71])


@pytest.mark.parametrize(("t", "longest"), [(100, 9), (250, 1)], ids=["whole", "cut"])
def test_gradients_of_the_states(t: int, longest: int) -> None:
    x = run.make(1, t, 2, "slow")
    s0 = torch.randn(1, 2, 128, 128, device="cuda", requires_grad=True)
    ds = torch.randn(1, 2, 128, 128, device="cuda")
    do = torch.randn(1, t, 2, 128, device="cuda").to(torch.bfloat16)
    with run.cut_into(longest):
        o, final = run.ours(*x, initial_state=s0, output_final_state=True)
        got = torch.autograd.grad([o, final], [*x, s0], [do, ds])
    y = [t.detach().double().requires_grad_() for t in (*x, s0)]
    ro, rs = stages.recurrence(*(t[0] for t in y[:5]), y[5], y[6], run.BOUND, y[7][0])
    want = torch.autograd.grad([ro, rs], y, [do[0].double(), ds[0].double()])
    for name, a, b in zip((*run.NAMES, "dinitial"), got, want, strict=True):
        assert run.relative(a, b) < (4e-2 if name == "dA_log" else 2e-2), name


@pytest.mark.parametrize("longest", [4, 1 << 20])
def test_a_graph_of_both_passes_repeats_them(longest: int) -> None:
    """Cut into segments, the states run on a stream of their own, which joins within the graph."""
    x = run.make(1, 1024, 16, "mixed")
    do = torch.randn_like(x[2])
    with run.cut_into(longest):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                want = run.gradients(run.ours, x, do)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = run.gradients(run.ours, x, do)
    for y in (got[0], *got[2]):
        y.detach().zero_()
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got[0], want[0])
    assert all(torch.equal(a, b) for a, b in zip(got[2], want[2], strict=True))


MILLION = 1_048_576


def repeated(x: list[Tensor], times: int) -> list[Tensor]:
    """The same document over and over; A_log and dt_bias as they are."""
    return [y.repeat(1, times, *[1] * (y.ndim - 2)) for y in x[:5]] + x[5:]


def test_a_million_tokens_of_equal_documents_are_one_document_over_and_over() -> None:
    """17 heads are more than 2^31 numbers: the last document would be wrong if an offset had 32 bits."""
    n = MILLION // 16
    x = [y.detach() for y in run.make(1, n, 17, "slow")]
    with run.cut_into(n):
        alone, _ = run.ours(*x)
        many, _ = run.ours(*repeated(x, 16), borders=tuple(range(0, MILLION + 1, n)))
    assert many.numel() > 2**31
    assert all(torch.equal(part, alone) for part in many.split(n, 1))


def test_gradients_of_a_million_tokens_of_equal_documents() -> None:
    n = MILLION // 16
    x = run.make(1, n, 2, "slow")
    do = torch.randn(1, n, 2, 128, device="cuda").to(torch.bfloat16)
    with run.cut_into(n // 256):
        _, _, alone = run.gradients(run.ours, x, do)
        y = [t.detach().requires_grad_() for t in repeated(x, 16)]
        borders = tuple(range(0, MILLION + 1, n))
        _, _, many = run.gradients(run.ours, y, do.repeat(1, 16, 1, 1), borders=borders)
    for got, want in zip(many[:5], alone[:5], strict=True):
        assert all(torch.equal(part, want) for part in got.split(n, 1))
    for got, want in zip(many[5:], alone[5:], strict=True):
        assert run.relative(got, 16 * want) < 1e-4


@pytest.mark.parametrize("regime", ["slow", "mixed"])
def test_one_document_of_a_million_tokens_is_its_halves_joined_by_the_state(regime: str) -> None:
    x = [y.detach() for y in run.make(1, MILLION, 2, regime)]
    whole, final = run.ours(*x, output_final_state=True)
    a, state = run.ours(*(y[:, : MILLION // 2] for y in x[:5]), *x[5:], output_final_state=True)
    rest = (y[:, MILLION // 2 :] for y in x[:5])
    b, last = run.ours(*rest, *x[5:], initial_state=state, output_final_state=True)
    # segments are other ones: each rounds its map of the state once
    assert run.relative(torch.cat([a, b], 1), whole) < 5e-3
    assert run.relative(last, final) < 5e-3
