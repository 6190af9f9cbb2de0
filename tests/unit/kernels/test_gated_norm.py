"""The gated RMSNorm of KDA heads against its formula."""

from __future__ import annotations

import torch

from k3train.kernels.gated_norm import gated_rms_norm


def test_formula_and_gradients() -> None:
    x, gate = torch.randn(2, 2, 5, 3, 8, dtype=torch.float64).unbind()
    inputs = [t.clone().requires_grad_() for t in (x, torch.randn(8, dtype=torch.float64), gate)]
    y = gated_rms_norm(*inputs, 1e-2)
    a, w, g = inputs
    expected = a / (a.square().mean(-1, keepdim=True) + 1e-2).sqrt() * w * torch.sigmoid(g)
    torch.testing.assert_close(y, expected)
    grad = torch.randn_like(y)
    for got, want in zip(
        torch.autograd.grad(y, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_bf16_is_computed_in_fp32() -> None:
    x, gate = torch.randn(2, 64, 32).bfloat16().unbind()
    x, gate, weight = x.requires_grad_(), gate.requires_grad_(), torch.randn(32, requires_grad=True)
    y = gated_rms_norm(x, weight, gate, 1e-5)
    exact = gated_rms_norm(x.double(), weight.double(), gate.double(), 1e-5)
    assert y.dtype == torch.bfloat16
    assert ((y - exact).norm() / exact.norm()) < 3e-3
    y.sum().backward()
    assert x.grad is not None
    assert gate.grad is not None
    assert weight.grad is not None
    assert (x.grad.dtype, gate.grad.dtype, weight.grad.dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
    )
