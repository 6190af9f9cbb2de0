"""Products of weights that are not trained: they get no gradient, and those beside them get theirs."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

from k3train.kernels.grouped_gemm import grouped_mm
from k3train.kernels.linear import linears


@pytest.mark.parametrize("trained", list(product([False, True], repeat=3)), ids=str)
@pytest.mark.parametrize("with_main_grad", [False, True])
def test_weights_side_by_side(trained: tuple[bool, ...], with_main_grad: bool) -> None:
    memory, sums = torch.randn(9, 4), torch.zeros(9, 4)
    weights = [nn.Parameter(w, requires_grad=t) for w, t in zip(memory.split(3), trained, strict=True)]
    if with_main_grad:
        for weight, total in zip(weights, sums.split(3), strict=True):
            weight.main_grad = total  # pyright: ignore[reportAttributeAccessIssue]
    x = torch.randn(5, 4, requires_grad=True)
    grads = torch.randn(5, 9).split(3, -1)
    torch.autograd.backward(linears(x, weights), grads)
    torch.testing.assert_close(x.grad, torch.cat(grads, -1) @ memory)
    for weight, total, grad, t in zip(weights, sums.split(3), grads, trained, strict=True):
        found = total if with_main_grad else weight.grad
        if t:
            torch.testing.assert_close(found, grad.T @ x.detach())
        else:
            assert found is None or not found.any()


@pytest.mark.parametrize("rows_trained", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_experts(device: str, rows_trained: bool) -> None:
    """An expert's gradient goes into ``main_grad`` by itself, which the optimizer would then take."""
    rows = torch.randn(6, 8, device=device).bfloat16().requires_grad_(rows_trained)
    weight = nn.Parameter(torch.randn(2, 8, 16, device=device).bfloat16(), requires_grad=not rows_trained)
    total = torch.zeros(2, 8, 16, device=device)
    weight.main_grad = total  # pyright: ignore[reportAttributeAccessIssue]
    grouped_mm(rows, weight, torch.tensor([2, 4])).sum().backward()
    assert bool(total.any()) is not rows_trained
    assert (rows.grad is not None) is rows_trained
