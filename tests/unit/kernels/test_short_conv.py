"""The short convolution against conv1d, document by document."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from k3train.kernels.packing import make_packing
from k3train.kernels.short_conv import short_conv


def plain(x: Tensor, weight: Tensor) -> Tensor:
    """One document a row."""
    taps = weight.shape[1]
    y = F.conv1d(F.pad(x.transpose(1, 2), (taps - 1, 0)), weight[:, None], groups=weight.shape[0])
    return F.silu(y.transpose(1, 2))


def draw(b: int, t: int, c: int, taps: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(b, t, c, dtype=torch.float64, requires_grad=True)
    return x, torch.randn(c, taps, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("taps", [1, 2, 4, 5])
@pytest.mark.parametrize("t", [1, 2, 3, 9])
def test_rows(t: int, taps: int) -> None:
    x, weight = draw(2, t, 3, taps)
    y, expected = short_conv(x, weight), plain(x, weight)
    torch.testing.assert_close(y, expected)
    grad = torch.randn_like(y)
    for a, b in zip(
        torch.autograd.grad(y, (x, weight), grad),
        torch.autograd.grad(expected, (x, weight), grad),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_documents() -> None:
    borders = [0, 1, 2, 4, 7, 20, 21]
    x, weight = draw(1, 21, 5, 4)
    packing = make_packing(borders, torch.ones(21, dtype=torch.bool))
    y = short_conv(x, weight, packing)
    expected = torch.cat([plain(d, weight) for d in x.split([1, 1, 2, 3, 13, 1], 1)], 1)
    torch.testing.assert_close(y, expected)
    grad = torch.randn_like(y)
    for a, b in zip(
        torch.autograd.grad(y, (x, weight), grad),
        torch.autograd.grad(expected, (x, weight), grad),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_a_document_cannot_see_an_infinite_neighbour() -> None:
    x, weight = draw(1, 12, 2, 4)
    packing = make_packing([0, 5, 12], torch.ones(12, dtype=torch.bool))
    before = short_conv(x, weight, packing)
    broken = x.detach().clone()
    broken[:, :5] = float("inf")
    assert torch.equal(short_conv(broken, weight, packing)[:, 5:], before[:, 5:])


def test_bf16_is_computed_in_fp32() -> None:
    x, weight = draw(1, 50, 8, 4)
    low = x.detach().bfloat16().requires_grad_()
    w = weight.detach().float().requires_grad_()
    y = short_conv(low, w)
    expected = plain(low.double(), w.double())
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, expected.float().bfloat16())
    y.sum().backward()
    assert low.grad is not None
    assert w.grad is not None
    assert (low.grad.dtype, w.grad.dtype) == (torch.bfloat16, torch.float32)


def test_refuses_rows_with_packing() -> None:
    x, weight = draw(2, 6, 2, 4)
    with pytest.raises(ValueError, match="packed documents need"):
        short_conv(x, weight, make_packing([0, 6], torch.ones(6, dtype=torch.bool)))
