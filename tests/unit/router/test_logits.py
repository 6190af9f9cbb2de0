"""Logits from bf16 tokens and an fp32 weight, as three bf16 products against one in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3train.router.logits import SplitLinear, router_logits

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def both(tokens: Tensor, weight: Tensor, grad: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Logits, gradient of tokens, gradient of the weight: as computed and in float64."""
    results = []
    for wide in (False, True):
        x, w = ((t.double() if wide else t).detach().requires_grad_() for t in (tokens, weight))
        logits = x @ w.T if wide else SplitLinear.apply(x, w)
        assert isinstance(logits, Tensor)
        results.append((logits.detach(), *torch.autograd.grad(logits, (x, w), grad.to(logits.dtype))))
    return list(zip(*results, strict=True))


def off(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_split_products_are_fp32(device: str, scale: float) -> None:
    torch.manual_seed(0)
    tokens = torch.randn(50, 96, device=device).bfloat16()
    weight = torch.randn(24, 96, device=device) * torch.logspace(-6, 3, 96, device=device) * scale
    # As a router's: only the chosen experts have a gradient.
    grad = torch.randn(50, 24, device=device) * (torch.rand(50, 24, device=device) < 0.2)
    logits, to_tokens, to_weight = both(tokens, weight, grad)
    assert logits[0].dtype is to_weight[0].dtype is torch.float32
    assert to_tokens[0].dtype is torch.bfloat16
    assert off(*logits) < 1e-6
    assert off(*to_weight) < 1e-6
    # No worse than the exact gradient rounded to bf16.
    assert off(*to_tokens) < 1.01 * off(to_tokens[1].bfloat16(), to_tokens[1]) + 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_a_token_of_one_input_reads_its_weight_exactly(device: str) -> None:
    """All 24 bits of an fp32 weight come through."""
    weight = torch.randn(8, 16, device=device)
    tokens = torch.eye(16, device=device).bfloat16()
    logits = SplitLinear.apply(tokens, weight)
    assert isinstance(logits, Tensor)
    assert torch.equal(logits, weight.T)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_router_logits_are_in_the_weights_dtype(device: str, dtype: torch.dtype) -> None:
    tokens, weight = torch.randn(5, 16, device=device).to(dtype), torch.randn(8, 16, device=device)
    logits = router_logits(tokens, weight)
    assert logits.dtype is torch.float32
    assert off(logits, tokens.double() @ weight.double().T) < 1e-6
