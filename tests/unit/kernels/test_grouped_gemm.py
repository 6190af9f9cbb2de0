"""Grouped matrix product against one product per expert."""

import pytest
import torch

from k3train.kernels.grouped_gemm import grouped_mm

COUNTS = [[3, 5, 2, 7], [0, 0, 17, 0], [17, 0, 0, 0], [0, 9, 0, 8], [0, 0, 0, 0], [1, 1, 1, 0]]


def one_by_one(rows, weight, counts):
    parts = rows.split(counts)
    return torch.cat([part @ matrix for part, matrix in zip(parts, weight, strict=True)])


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_values_and_gradients(counts):
    rows = torch.randn(sum(counts), 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 6, 5, dtype=torch.float64, requires_grad=True)
    out = grouped_mm(rows, weight, torch.tensor(counts))
    expected = one_by_one(rows, weight, counts)
    torch.testing.assert_close(out, expected)
    direction = torch.randn_like(out)
    mine = torch.autograd.grad((out * direction).sum(), (rows, weight))
    theirs = torch.autograd.grad((expected * direction).sum(), (rows, weight))
    torch.testing.assert_close(mine, theirs)


def test_gradient_that_is_not_contiguous():
    rows, weight = torch.randn(4, 6, requires_grad=True), torch.randn(2, 6, 5, requires_grad=True)
    grouped_mm(rows, weight, torch.tensor([1, 3])).sum().backward()
    torch.testing.assert_close(rows.grad, torch.cat((weight[:1], weight[1:].expand(3, -1, -1))).sum(-1))


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [*COUNTS, [128, 1, 63, 0]], ids=str)
@pytest.mark.parametrize("on_host", [True, False])
def test_bf16_on_the_gpu(counts, on_host):
    rows = torch.randn(sum(counts), 64, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(4, 64, 32, device="cuda").bfloat16().requires_grad_()
    out = grouped_mm(rows, weight, torch.tensor(counts, device="cpu" if on_host else "cuda"))
    direction = torch.randn_like(out)
    mine = torch.autograd.grad(out, (rows, weight), direction)
    wide = [t.detach().double().requires_grad_() for t in (rows, weight)]
    expected = one_by_one(*wide, counts)
    theirs = torch.autograd.grad(expected, wide, direction.double())
    for found, right in zip((out, *mine), (expected, *theirs), strict=True):
        torch.testing.assert_close(found.double(), right, atol=0.05, rtol=0.01)


def test_wide_experts_take_torch_s_product():
    """128 experts of 1024 x 768 were faster with the kernel of our own, 112 of 3584 x 3072 slower."""
    pytest.importorskip("triton")
    from k3train.kernels.triton_grouped import is_narrow

    assert is_narrow(torch.empty(128, 1024, 768, device="meta"))
    assert is_narrow(torch.empty(128, 768, 1024, device="meta"))
    assert not is_narrow(torch.empty(112, 3584, 3072, device="meta"))
    assert not is_narrow(torch.empty(112, 768, 3584, device="meta"))
