"""Packed causal attention against a masked dense softmax."""

from __future__ import annotations

import pytest
import torch

from k3train.kernels import attention as kernel
from k3train.kernels.attention import attention, attention_of_ranges, attention_reference

RAGGED = [(0, 40), (0, 1, 2, 3, 9, 40), (0, 17, 18, 40), tuple(range(41))]


def _inputs(n: int, d: int, e: int, dtype=torch.float64, heads: int = 3):
    return tuple(torch.randn(n, heads, c, dtype=dtype, requires_grad=True) for c in (d, d, e))


def _gradients(function, qkv, borders):
    out = function(*qkv, borders, 0.3)
    direction = torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape).sin()
    return (out, *torch.autograd.grad(out, qkv, direction))


@pytest.mark.parametrize("short", [1, 8, 512])
@pytest.mark.parametrize("borders", RAGGED)
@pytest.mark.parametrize(("d", "e"), [(6, 4), (4, 6), (5, 5)])
def test_equals_dense_softmax(monkeypatch, borders, d, e, short):
    monkeypatch.setattr(kernel, "SHORT_TOKENS", short)
    qkv = _inputs(40, d, e)
    got, want = _gradients(attention, qkv, borders), _gradients(attention_reference, qkv, borders)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("borders", [(0, 600), (0, 600, 1300, 1310)])
def test_no_gradient_is_that_of_a_slice(borders):
    """It would fill a buffer of all tokens with zeros, for each run of documents."""
    q, k, v = (torch.randn(borders[-1], 2, 8, requires_grad=True) for _ in range(3))
    seen, waiting = set(), [attention(q, k, v, borders, 0.3).grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    assert len(seen) > 5
    assert not [node for node in seen if "Slice" in node.name()]


def test_runs_tile_the_buffer_and_keep_long_documents_whole():
    borders = (0, 3, 5, 700, 703, 1200, 1201, 3000)
    runs = kernel.document_runs(borders, kernel.SHORT_TOKENS)
    assert [run[0] for run in runs[1:]] == [run[-1] for run in runs[:-1]]
    assert (runs[0][0], runs[-1][-1]) == (0, 3000)
    assert sorted({border for run in runs for border in run}) == list(borders)
    assert all(len(run) == 2 or run[-1] - run[0] <= kernel.SHORT_TOKENS for run in runs)


def test_thousands_of_tiny_documents_take_few_calls():
    assert len(kernel.document_runs(tuple(range(0, 8193, 2)), kernel.SHORT_TOKENS)) == 16


RANGES = [((0, 40),), ((0, 3), (9, 17)), ((5, 6), (17, 20), (39, 40)), ((1, 40),)]


@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize("borders", RAGGED)
@pytest.mark.parametrize("ranges", RANGES)
def test_ranges_are_rows_of_the_whole(borders, ranges, selective):
    q, k, v = _inputs(40, 6, 4)
    rows = torch.cat([torch.arange(*each) for each in ranges])

    def of_ranges(q, k, v, borders, scale):
        return attention_of_ranges(q[rows], k, v, borders, ranges, scale, selective=selective)

    def cut(*given):
        return attention_reference(*given)[rows]

    got, want = _gradients(of_ranges, (q, k, v), borders), _gradients(cut, (q, k, v), borders)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("ranges", [((0, 700), (1400, 2048)), ((5, 6), (1024, 1600))])
def test_ranges_on_the_gpu(ranges):
    borders = (0, 2, 130, 1500, 2048)
    qkv = [x.detach().cuda().bfloat16().requires_grad_() for x in _inputs(2048, 192, 128, torch.float32, 4)]
    rows = torch.cat([torch.arange(*each) for each in ranges]).cuda()
    want = attention_reference(*(x.float() for x in qkv), borders, 192**-0.5)[rows]
    direction = torch.randn_like(want)
    want = (want, *torch.autograd.grad(want, qkv, direction))
    got = attention_of_ranges(qkv[0][rows], *qkv[1:], borders, ranges, 192**-0.5, selective=True)
    got = (got, *torch.autograd.grad(got, qkv, direction.bfloat16()))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=3e-2, atol=3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("borders", [(0, 1, 2, 130, 131, 1500, 2048), tuple(range(0, 2049, 8)), (0, 2048)])
def test_on_the_gpu(dtype, borders):
    reference = [
        x.detach().cuda().to(dtype).requires_grad_() for x in _inputs(2048, 192, 128, torch.float32, 4)
    ]
    direction = torch.randn(2048, 4, 128, device="cuda")
    want = attention_reference(*(x.float() for x in reference), borders, 192**-0.5)
    want = (want, *torch.autograd.grad(want, reference, direction))
    got = attention(*reference, borders, 192**-0.5)
    got = (got, *torch.autograd.grad(got, reference, direction.to(dtype)))
    for a, b in zip(got, want, strict=True):
        error = (a.float() - b.float()).norm() / b.float().norm()
        assert error < (1e-2 if dtype is torch.bfloat16 else 1e-3), error
