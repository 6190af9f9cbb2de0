"""Documents cut into segments and into shards: the Hopper kernels' driver over the same algebra in torch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from k3train.kernels.kda import segments, triton_kda, triton_states
from k3train.kernels.kda.segments import Ends
from tests.gpu import kda_stages as stages

BOUND = -5.0
NAMES = ("dq", "dk", "dv", "dz", "dbeta", "dA_log", "ddt_bias")


@pytest.fixture
def algebra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch in float64 in the place of every kernel; the driver around them is the real one."""

    def operands(inputs, call, scores=None):
        q, k, _, z, beta, A_log, dt_bias = inputs
        x = stages.packed_operands(q, k, z, beta, A_log, dt_bias, call.borders, call.bound)
        return x | {"rs": x["rq"]} | (scores or {})

    def chain(x, v, table, kind, entering, leaving, *, o=None, hs=None, us=None):
        rows = table.rows["maps" if kind == "maps" else "main"]
        stages.chain_rows(x, v, rows, entering, leaving, o, hs, us)

    def chain_back(x, do, table, kind, entering, leaving, *, dhs=None, dv=None):
        rows = table.rows["maps" if kind == "back maps" else "main"]
        stages.chain_back_rows(x, do, rows, entering, leaving, dhs, dv)

    def scan(table, name, written, transition, *, start=None, states=None, end=None, transposed=False):
        rows, steps = table.rows[name], table.rows[f"{name} steps"]
        stages.scan_rows(rows, steps, start, written, transition, states, end, transposed)

    def input_gradients(inputs, o, do, us, dv, hs, dhs, rs, call):
        _, _, v, z, _, A_log, dt_bias = inputs
        x = operands(inputs, call)
        o, do, v, dv = (stages.to_chunks(y, call.borders) for y in (o, do, v, dv))
        sc = stages.score(o, v, x["beta"], do, us, dv)
        dq, dk, dz = stages.gradient(
            x["q"], x["k"], x["g"], BOUND, do, us, dv, hs, dhs, sc, x["rq"], x["rk"], x["s"], torch.ones(1)
        )
        dq, dk, dz = (stages.to_tokens(y, call.borders) for y in (dq, dk, dz * A_log.exp()[:, None, None]))
        dbeta = stages.to_tokens(sc["dbeta"][..., None], call.borders)[..., 0]
        zb = z + dt_bias.view(z.shape[1:])
        return dq, dk, dz, dbeta, (dz * zb).sum((0, 2)), dz.sum(0).flatten()

    monkeypatch.setattr(triton_kda, "_operands", operands)
    monkeypatch.setattr(triton_kda, "_input_gradients", input_gradients)
    for module in (triton_kda, triton_states):
        monkeypatch.setattr(module, "chain", chain)
        monkeypatch.setattr(module, "chain_back", chain_back)
    monkeypatch.setattr(triton_states, "_scan", scan)


def draw(t: int, h: int, d: int) -> list[Tensor]:
    """Inputs with slow decay and correlated keys: states carry over many chunks."""
    gen = torch.Generator().manual_seed(t)

    def n(*s: int) -> Tensor:
        return torch.randn(*s, generator=gen, dtype=torch.float64)

    q, k, v, z = (n(t, h, d) for _ in range(4))
    return [q, k + k[:1], v, z * 0.5 - 7, n(t, h) - 1, n(h) * 0.2, n(h * d) * 0.1]


def call_of(borders: tuple[int, ...], heads: int, ends: Ends, exchange: Any, longest: int) -> Any:
    keep = {1: "nothing", 2: "operands"}.get(longest, "scores")
    call = triton_kda._Call(borders, heads, ends, exchange, BOUND, torch.device("cpu"), keep)
    call.longest = longest
    return call


def recurrence(x: list[Tensor], borders: tuple[int, ...], initial: Tensor | None) -> tuple[Tensor, Tensor]:
    parts = [
        stages.recurrence(
            *(y[a:e] for y in x[:5]), x[5], x[6], BOUND, None if initial is None else initial[i]
        )
        for i, (a, e) in enumerate(pairwise(borders))
    ]
    return torch.cat([o for o, _ in parts]), torch.stack([s for _, s in parts])


def near(got: Tensor, want: Tensor) -> bool:
    return float((got - want).norm()) <= 1e-9 * float(want.norm())


@pytest.mark.parametrize("longest", [1, 2, 3])
@pytest.mark.parametrize("borders", [(0, 330), (0, 3, 259, 300, 430)], ids=["one", "packed"])
@pytest.mark.parametrize("states", [False, True])
def test_segments_give_the_recurrence(algebra, longest: int, borders: tuple[int, ...], states: bool) -> None:
    h, d = 2, 8
    x = [y.requires_grad_() for y in draw(borders[-1], h, d)]
    s0 = torch.randn(len(borders) - 1, h, d, d, dtype=torch.float64, requires_grad=True) if states else None
    want, want_final = recurrence(x, borders, s0)
    ends = Ends(enters="all" if states else "")
    call = call_of(borders, h, ends, None, longest)
    o, final = triton_kda._Kda.apply(*x, s0, call, True)
    assert near(o, want)
    assert near(final, want_final)
    leaves = [*x, s0] if s0 is not None else x
    do, ds = torch.randn_like(want), torch.randn_like(want_final)
    outputs = [(o, want, do), (final, want_final, ds)] if states else [(o, want, do)]
    got = torch.autograd.grad([a for a, _, _ in outputs], leaves, [g for _, _, g in outputs])
    ref = torch.autograd.grad([b for _, b, _ in outputs], leaves, [g for _, _, g in outputs])
    for name, a, b in zip((*NAMES, "dinitial"), got, ref, strict=False):
        assert near(a, b), name


@pytest.mark.parametrize("longest", [1, 2, 9])
@pytest.mark.parametrize("borders", [(0, 400), (0, 1, 150, 200, 201, 399, 400), (0, 30, 400)])
def test_shards_give_the_recurrence(algebra, longest: int, borders: tuple[int, ...]) -> None:
    h, d, size = 2, 8, 4
    t = borders[-1] // size
    x = [y.requires_grad_() for y in draw(borders[-1], h, d)]
    want, _ = recurrence(x, borders, None)
    do = torch.randn_like(want)
    ref = torch.autograd.grad(want, x, do)
    exchange, outputs, shards = stages.InTurn(None), [], []
    for r in range(size):
        local = (0, *(b - r * t for b in borders if r * t < b < (r + 1) * t), t)
        ends = Ends(
            enters="first" if r * t not in borders else "",
            leaves="last" if (r + 1) * t not in borders else "",
            shared=True,
        )
        part = [y.detach()[r * t : (r + 1) * t].requires_grad_() for y in x[:5]]
        part += [y.detach().requires_grad_() for y in x[5:]]
        o, _ = triton_kda._Kda.apply(*part, None, call_of(local, h, ends, exchange, longest), False)
        outputs.append(o)
        shards.append(part)
    assert near(torch.cat(outputs), want)
    exchange.state = None
    got = [
        torch.autograd.grad(outputs[r], shards[r], do[r * t : (r + 1) * t]) for r in reversed(range(size))
    ][::-1]
    for i, (name, b) in enumerate(zip(NAMES, ref, strict=True)):
        parts = [g[i] for g in got]
        assert near(torch.cat(parts) if i < 5 else torch.stack(parts).sum(0), b), name


def test_a_cut_covers_every_chunk_once() -> None:
    for borders in [(0, 1), (0, 64), (0, 65, 1000, 1001, 9000)]:
        for longest in (1, 3, 50, 1000):
            parts = segments.cut(borders, Ends(), longest)
            assert [(s.start, s.start + s.tokens) for s in parts] == list(
                pairwise(sorted({*borders, *(s.start for s in parts)}))
            )
            assert all(s.chunks <= longest for s in parts)
            assert all(a.chunk + a.chunks == b.chunk for a, b in pairwise(parts))


def test_long_documents_of_few_heads_are_cut_and_others_are_not() -> None:
    one = (0, 131072)
    assert segments.longest_segment(one, 16, Ends()) == 256
    assert segments.longest_segment(one, 96, Ends()) == 2048
    assert segments.longest_segment((0, 512), 1, Ends()) == 8
    assert segments.longest_segment(tuple(range(0, 65537, 4096)), 16, Ends()) == 64
