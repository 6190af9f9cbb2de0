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


@pytest.mark.parametrize("counts", [[0, 700, 1, 63], [0, 0, 0, 0], [128, 128, 128, 128]])
def test_experts(counts: list[int]) -> None:
    rows = torch.randn(sum(counts), 136, device="cuda").bfloat16().requires_grad_()
    weights = with_buffers([torch.randn(4, 136, 264, device="cuda").bfloat16() for _ in range(2)], False)
    before = [w.main_grad.double() for w in weights]  # type: ignore[attr-defined]
    outs = grouped_mms(rows, weights, torch.tensor(counts, device="cuda"))
    grads = [torch.randn_like(out) for out in outs]
    torch.autograd.backward(outs, grads)
    for w, g, want in zip(weights, grads, before, strict=True):
        for i, (x, d) in enumerate(zip(rows.detach().split(counts), g.split(counts), strict=True)):
            want[i] += x.double().T @ d.double()
        assert error(w.main_grad, want) < 1e-5  # type: ignore[attr-defined]


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
