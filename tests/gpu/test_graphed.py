"""Replayed graphs compute what the function computes, on a GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from k3train.kernels.graphed import Graphed
from k3train.kernels.rms_norm import rms_norm
from k3train.model.parameters import Linear

pytestmark = pytest.mark.gpu


class Part(nn.Module):
    """A norm, whose weight has an ordinary gradient, and a linear, whose gradient is added to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.rand(256, device="cuda"))
        self.linear = Linear(256, 256, bias=False, dtype=torch.bfloat16, device="cuda")
        self.linear.weight.main_grad = torch.zeros(256, 256, device="cuda")  # type: ignore[attr-defined]
        self.seen = torch.zeros((), device="cuda")

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        """x bf16 [n, 256], valid bool [n], counted on the way."""
        self.seen += valid.sum()
        return x + self.linear(rms_norm(x, self.norm, 1e-5))


def test_passes_equal_those_without_graphs() -> None:
    torch.manual_seed(0)
    part = Part()
    graphed = Graphed([part])
    fed = partial(graphed, part)
    passes = [
        (torch.randn(64, 256, device="cuda").bfloat16(), torch.rand(64, device="cuda") < 0.5)
        for _ in range(4)
    ]

    def run(function: object, together: bool) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        part.linear.weight.main_grad.zero_()  # type: ignore[attr-defined]
        part.seen.zero_()
        part.norm.grad = None
        outs, leaves = [], []
        for x, valid in passes:
            leaves.append(x.clone().requires_grad_())
            outs.append(function(leaves[-1] * 1, valid))  # type: ignore[operator]
            if not together:
                outs[-1].backward(2 * x)
                outs[-1] = outs[-1].detach().clone()
        for out, (x, _) in zip(outs, passes, strict=True):
            if together:
                out.backward(2 * x)
        values = [out.detach().clone() for out in outs] + [leaf.grad for leaf in leaves]
        assert part.norm.grad is not None
        return values, part.norm.grad.clone(), part.linear.weight.main_grad.clone(), part.seen.clone()  # type: ignore[attr-defined]

    want = run(part, together=False)
    for together in (False, True):  # all forward passes before the first backward pass: one is replayed
        got = run(fed, together)
        assert all(torch.equal(a, b) for a, b in zip(got[0], want[0], strict=True))
        for a, b in zip(got[1:], want[1:], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert [r is not None for r in graphed.recordings.values()] == [True]
