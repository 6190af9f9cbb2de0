"""A second derivative is an error where there is none, and first ones never are."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import k3train
from k3train.kernels.attn_res import mix
from k3train.kernels.cross_entropy import cross_entropy
from k3train.kernels.embedding import embed
from k3train.kernels.gated_norm import gated_rms_norm
from k3train.kernels.grouped_gemm import grouped_mm
from k3train.kernels.kda.choose import kda
from k3train.kernels.linear import linear
from k3train.kernels.main_grad import part_of
from k3train.kernels.permute import permute, sort_routes, sort_weights, unpermute
from k3train.kernels.recompute import again, make_again
from k3train.kernels.rms_norm import rms_norm
from k3train.kernels.short_conv import short_conv
from k3train.kernels.situ import situ_glu
from k3train.router.logits import SplitLinear

DIFFERENTIABLE = {"_Mix", "_WithLoss"}
"""Functions whose backward pass consists of torch's own operations on what they were given."""


class _One:
    """A group of one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def _some(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _kda(x: Tensor) -> Tensor:
    x = x.view(1, 4, 1, 4)
    return kda(x, x, x, x, x[..., 0], _some(1), _some(4), gate_lower_bound=-5)[0]


_ROUTES = sort_routes(torch.tensor([[0, 2], [1, 0], [2, 1], [1, 2]]), 3)
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "situ_glu": lambda x: situ_glu(x, x, 4.0, 25.0),
    "kda": _kda,
    "short_conv": lambda x: short_conv(x[None], _some(4, 3)),
    "rms_norm": lambda x: rms_norm(x, _some(4), 1e-5),
    "gated_rms_norm": lambda x: gated_rms_norm(x, _some(4), x, 1e-5),
    "linear": lambda x: linear(x, _some(3, 4)),
    "split linear": lambda x: SplitLinear.apply(x.bfloat16(), _some(3, 4)),  # type: ignore[return-value]
    "cross_entropy": lambda x: cross_entropy(x, _some(8, 4), torch.tensor([1, 2, 3, 4]), _One()),
    "embed": partial(embed, torch.tensor([0, 2, 2])),
    "grouped_mm": lambda x: grouped_mm(x, _some(2, 4, 3), torch.tensor([1, 3])),
    "permute": lambda x: permute(x, _ROUTES),
    "unpermute": lambda x: unpermute(torch.cat([x, x]), _ROUTES),
    "sort_weights": lambda x: sort_weights(x[:, :2], _ROUTES),
    "part_of": lambda x: part_of(x, 0, 1, 2),
    "make_again": lambda x: make_again(torch.tanh, torch.sin, x, on=True),
}


@pytest.fixture
def x() -> Tensor:
    return _some(4, 4).requires_grad_()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_second_derivative_is_an_error_and_a_first_is_not(name: str, x: Tensor) -> None:
    function = FUNCTIONS[name]
    (first,) = torch.autograd.grad(function(x).sum(), x)
    assert first.isfinite().all()
    with pytest.raises(RuntimeError, match=r"has no second derivative: .* without create_graph=True"):
        torch.autograd.grad(function(x).sum(), x, create_graph=True)


@pytest.mark.parametrize("name", ["situ_glu", "kda", "make_again"])
def test_recomputation_goes_through(name: str, x: Tensor) -> None:
    function = FUNCTIONS[name]
    (wanted,) = torch.autograd.grad(function(x).sum(), x)
    for run in (
        partial(checkpoint, function, use_reentrant=True),
        partial(checkpoint, function, use_reentrant=False),
        partial(again, function, on=True),
    ):
        x.grad = None
        with torch.enable_grad():
            run(x).sum().backward()  # type: ignore[union-attr]
        assert torch.equal(x.grad, wanted)  # type: ignore[arg-type]


def test_mix_has_a_second_derivative() -> None:
    sources = [_some(2, i).double().requires_grad_() for i in (3, 3)]
    query, weight = (_some(3).double().mul(i).requires_grad_() for i in (1, 2))
    assert torch.autograd.gradgradcheck(
        lambda q, w, *s: mix(s, q, w, 1e-5), (query, weight, sources[0], sources[1].detach().requires_grad_())
    )


def test_no_function_is_forgotten() -> None:
    """Every autograd Function of the package says whether its gradient has a derivative."""
    silent, bases = set(), ("Function", "torch.autograd.Function")
    for file in Path(k3train.__file__).parent.rglob("*.py"):
        for cls in ast.walk(ast.parse(file.read_text())):
            if isinstance(cls, ast.ClassDef) and any(ast.unparse(b) in bases for b in cls.bases):
                (backward,) = (f for f in cls.body if getattr(f, "name", "") == "backward")
                if "once_differentiable" not in map(ast.unparse, backward.decorator_list):  # type: ignore[attr-defined]
                    silent.add(cls.name)
    assert silent == DIFFERENTIABLE
