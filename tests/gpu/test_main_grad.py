"""Weight gradients that products add to fp32 buffers, on a GPU in bf16, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3train.kernels.embedding import embed
from k3train.kernels.grouped_gemm import grouped_mms
from k3train.kernels.linear import linears

pytestmark = pytest.mark.gpu


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def with_buffers(weights: list[Tensor], beside: bool) -> list[Tensor]:
    """The weights as leaves, and somewhere to sum their gradients, in which something lies already."""
    if beside:
        whole = torch.cat([w.flatten() for w in weights])
        weights = [
            part.view(w.shape)
            for part, w in zip(whole.split([w.numel() for w in weights]), weights, strict=True)
        ]
    sums = torch.randn(sum(w.numel() for w in weights), device="cuda")
    leaves = [w.detach().requires_grad_() for w in weights]
    for leaf, part in zip(leaves, sums.split([w.numel() for w in weights]), strict=True):
        leaf.main_grad = part.view(leaf.shape)  # type: ignore[attr-defined]
        leaf.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    return leaves


@pytest.mark.parametrize("beside", [True, False])
def test_linears(beside: bool) -> None:
    x = torch.randn(300, 1, 256, device="cuda").bfloat16().requires_grad_()
    weights = with_buffers([torch.randn(m, 256, device="cuda").bfloat16() for m in (512, 16, 128)], beside)
    before = [w.main_grad.double() for w in weights]  # type: ignore[attr-defined]
    outs = linears(x, weights)
    grads = [torch.randn_like(out) for out in outs]
    torch.autograd.backward(outs, grads)
    rows = x.detach()[:, 0].double()
    for w, out, g, old in zip(weights, outs, grads, before, strict=True):
        assert error(out[:, 0], rows @ w.double().T) < 4e-3
        assert error(w.main_grad, old + g[:, 0].double().T @ rows) < 1e-5  # type: ignore[attr-defined]
        assert w.grad_added_to_main_grad  # type: ignore[attr-defined]
    want = sum(g.double() @ w.double() for g, w in zip(grads, weights, strict=True))
    assert x.grad is not None
    assert error(x.grad, want) < 6e-3  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("counts", "k", "n"),
    [
        ([0, 700, 1, 63], 136, 264),
        ([0, 0, 0, 0], 136, 264),
        ([128, 128, 128, 128], 1024, 768),
        ([64, 65, 300, 5], 768, 1024),
        ([64, 0, 300, 5], 1536, 1032),  # torch's product
        ([3, 0, 0, 0], 64, 8),
    ],
)
@pytest.mark.parametrize("weights", [1, 2, 3])
@pytest.mark.parametrize("beside", [True, False])
def test_experts(counts: list[int], k: int, n: int, weights: int, beside: bool) -> None:
    t = sum(counts)
    rows = torch.randn(t, k, device="cuda").bfloat16().requires_grad_()
    leaves = with_buffers([torch.randn(4, k, n, device="cuda").bfloat16() for _ in range(weights)], False)
    sums = [w.main_grad.double() for w in leaves]  # type: ignore[attr-defined]
    outs = grouped_mms(rows, leaves, torch.tensor(counts, device="cuda"))
    grads = torch.randn(t, weights * n, device="cuda").bfloat16().split(n, 1)
    torch.autograd.backward(outs, grads if beside else [g.contiguous() for g in grads])
    back = torch.zeros(t, k, dtype=torch.float64, device="cuda")
    for w, out, grad, want in zip(leaves, outs, grads, sums, strict=True):
        parts = zip(*(x.detach().double().split(counts) for x in (rows, out, grad, back)), strict=True)
        for i, (x, y, d, b) in enumerate(parts):
            matrix = w[i].detach().double()
            assert error(y, x @ matrix) < 4e-3 or not len(x)
            b += d @ matrix.T
            want[i] += x.T @ d
        assert error(w.main_grad, want) < 1e-5  # type: ignore[attr-defined]
    assert rows.grad is not None
    assert error(rows.grad, back) < 6e-3 or not t


def test_embedding() -> None:
    (weight,) = with_buffers([torch.randn(50, 768, device="cuda").bfloat16()], False)
    want = weight.main_grad.double()  # type: ignore[attr-defined]
    tokens = torch.randint(-5, 55, (2, 400), device="cuda")
    tokens[0, :50] = 7
    out = embed(tokens, weight)
    grad = torch.randn_like(out)
    out.backward(grad)
    mine = (tokens >= 0) & (tokens < 50)
    assert torch.equal(out[mine], weight.detach()[tokens[mine]])
    assert not out[~mine].any()
    want.index_add_(0, tokens[mine], grad[mine].double())
    assert error(weight.main_grad, want) < 1e-6  # type: ignore[attr-defined]
