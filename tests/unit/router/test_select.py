"""Selection and counting in one pass: the Triton kernel against plain torch, interpreted and on a GPU."""

from __future__ import annotations

import pytest
import torch

from k3train.router.select import Tally, select, select_reference
from tests import interpreted

SHAPES = [(37, 20, 4, 50), (5, 896, 16, 1000), (9, 64, 1, 7), (0, 8, 2, 10), (12, 3, 2, 5)]
"""Tokens, experts, top k, bins."""


PROGRAM = "from tests.unit.router.test_select import interpret; interpret()"


def case(n: int, experts: int, bins: int, masked: bool, device: str = "cpu"):
    """Logits, a bias of both signs, and a function that makes an empty tally."""
    g = torch.Generator().manual_seed(n + experts)
    logits, bias = 2 * torch.randn(n, experts, generator=g), 0.3 * torch.randn(experts, generator=g)
    bias[0] = -1.5  # biased scores of both signs
    valid = torch.rand(n, generator=g) < 0.7 if masked else None
    bounds = torch.stack((bias.min() - 1, bias.max() + 1))
    logits, bias, bounds = (x.to(device) for x in (logits, bias, bounds))
    valid = None if valid is None else valid.to(device)

    def tally() -> Tally:
        loads = torch.zeros(experts, dtype=torch.int64, device=device)
        histogram = torch.zeros(experts, bins, dtype=torch.int32, device=device)
        return Tally(loads, histogram, bounds, valid)

    return logits, bias, tally


def interpret() -> None:
    """Compare the kernel with plain torch; run by the test below in a process whose Triton interprets."""
    from k3train.router import triton_select

    for n, experts, k, bins in SHAPES:
        for masked in (False, True):
            logits, bias, tally = case(n, experts, bins, masked)
            got, want = tally(), tally()
            for _ in range(2):  # counts add up
                chosen, cutoff = triton_select.select(logits, bias, k, got)
                wanted = select_reference(logits, bias, k, want)
            assert torch.equal(chosen, wanted.experts), (n, experts)
            torch.testing.assert_close(cutoff, wanted.cutoff)
            assert torch.equal(got.loads, want.loads)
            assert got.histogram is not None
            assert want.histogram is not None
            # a sigmoid that rounds otherwise may move a margin over a border
            assert int((got.histogram - want.histogram).abs().sum()) <= 4
            assert torch.equal(got.histogram.sum(-1), want.histogram.sum(-1))
            again, _ = triton_select.select(logits, bias, k, None)
            assert torch.equal(again, chosen)
    ties = torch.zeros(3, 10)
    assert triton_select.select(ties, torch.zeros(10), 4, None)[0].tolist() == [[0, 1, 2, 3]] * 3


@interpreted.needs_triton
def test_interpreted_kernel_equals_plain_torch() -> None:
    done = interpreted.interpret(PROGRAM, seconds=240)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_cpu_takes_plain_torch_in_any_dtype() -> None:
    logits, bias, tally = case(30, 12, 40, True)
    for dtype in (torch.float32, torch.float64):
        got, want = tally(), tally()
        chosen = select(logits.to(dtype), bias, 3, got)
        assert torch.equal(chosen.experts, select_reference(logits.to(dtype), bias, 3, want).experts)
        assert torch.equal(got.loads, want.loads)
        assert int(got.loads.sum()) == 3 * int(got.valid.sum())  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("logits", "bias", "top_k", "told"),
    [
        (
            (2, 4, 3),
            (3,),
            2,
            "logits have shape (2, 4, 3) and bias (3,): select needs [n, experts] and [experts]",
        ),
        ((4, 3), (1,), 2, "logits have shape (4, 3) and bias (1,): select needs [n, experts] and [experts]"),
        ((4, 3), (3,), 5, "top_k = 5 must be at least 1 and at most the 3 experts"),
        ((4, 3), (3,), 0, "top_k = 0 must be at least 1 and at most the 3 experts"),
    ],
)
def test_what_cannot_be_selected_from_is_refused(
    logits: tuple[int, ...], bias: tuple[int, ...], top_k: int, told: str
) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the test compares the sentence
        select(torch.randn(logits), torch.randn(bias), top_k, None)
    assert str(refused.value) == told


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("n", "experts", "k", "bins"), [*SHAPES, (4097, 896, 16, 1000)])
def test_kernel_on_the_gpu(n: int, experts: int, k: int, bins: int, masked: bool) -> None:
    logits, bias, tally = case(n, experts, bins, masked, "cuda")
    got, again, want = tally(), tally(), tally()
    found = select(logits, bias, k, got)
    repeated = select(logits, bias, k, again)
    wanted = select_reference(logits, bias, k, want)
    assert torch.equal(found.experts, repeated.experts)
    assert torch.equal(got.loads, again.loads)
    assert got.histogram is not None
    assert want.histogram is not None
    assert torch.equal(got.histogram, again.histogram)  # type: ignore[arg-type]
    same = (found.experts == wanted.experts).float().mean() if n else torch.tensor(1.0)
    assert same > 0.9999
    torch.testing.assert_close(found.cutoff, wanted.cutoff, atol=1e-6, rtol=1e-6)
    moved = int((got.histogram - want.histogram).abs().sum())
    assert moved <= 2 + 1e-3 * n * experts
    assert torch.equal(got.histogram.sum(-1), want.histogram.sum(-1))
