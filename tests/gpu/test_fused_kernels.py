"""Fused kernels on a GPU in bf16 against the plain torch paths in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from k3train.kernels.cross_entropy import cross_entropy
from k3train.kernels.gate import sigmoid_gate
from k3train.kernels.gated_norm import gated_rms_norm
from k3train.kernels.keys import keys_and_values
from k3train.kernels.packing import make_packing
from k3train.kernels.rms_norm import rms_norm
from k3train.kernels.short_conv import short_conv
from k3train.router.weights import route_weights

pytestmark = pytest.mark.gpu


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    """A group of one rank, which nothing is ever sent over."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def compare(function: Callable[..., Tensor], inputs: list[Tensor], tolerance: float = 6e-3) -> None:
    """Value and gradients as given and in float64."""
    results = []
    for wide in (False, True):
        leaves = [(x.double() if wide else x).detach().requires_grad_() for x in inputs]
        y = function(*leaves)
        torch.manual_seed(7)
        grad = torch.randn(y.shape, device="cuda").to(y.dtype)
        results.append((y, *torch.autograd.grad(y, leaves, grad)))
    for i, (got, want) in enumerate(zip(*results, strict=True)):
        error = (got.double() - want.double()).norm() / want.double().norm()
        assert error < tolerance, (i, float(error))


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


@pytest.mark.parametrize("borders", [(0, 1, 2, 65, 66, 200, 1000), (0, 3), None])
def test_short_conv(borders: tuple[int, ...] | None) -> None:
    t = borders[-1] if borders else 1000
    valid = torch.ones(t, dtype=torch.bool)
    packing = None if borders is None else make_packing(borders, valid, device="cuda")
    compare(lambda x, w: short_conv(x, w, packing), [bf16(1, t, 384), torch.randn(384, 4, device="cuda")])


@pytest.mark.parametrize(("n", "c"), [(1, 7168), (1500, 2048), (3, 1), (700, 6000)])
def test_rms_norm(n: int, c: int) -> None:
    x, weight = bf16(n, 2 * c)[:, :c], torch.randn(c, device="cuda")
    compare(lambda x, w: rms_norm(x, w, 1e-5), [x, weight])


def test_gated_norm() -> None:
    inputs = [bf16(1, 300, 16, 128), torch.randn(128, device="cuda"), bf16(1, 300, 16, 128)]
    compare(lambda x, w, g: gated_rms_norm(x, w, g, 1e-5), inputs)


def test_sigmoid_gate() -> None:
    compare(sigmoid_gate, [bf16(300, 1, 2100), bf16(300, 1, 2500)[..., :2100]])


@pytest.mark.parametrize("heads", [3, 40])
def test_keys_and_values(heads: int) -> None:
    def both(kv: Tensor, shared: Tensor) -> Tensor:
        return torch.cat([x.flatten(1) for x in keys_and_values(kv, shared, heads, 128)], 1)

    compare(both, [bf16(200, heads * 208), bf16(200, 100)[:, :64]])


@pytest.mark.parametrize(("experts", "top_k"), [(128, 8), (896, 16), (20, 3)])
def test_route_weights(experts: int, top_k: int) -> None:
    logits = torch.randn(333, experts, device="cuda")
    chosen = torch.rand_like(logits).topk(top_k).indices
    compare(lambda x: route_weights(x, chosen), [logits], tolerance=1e-6)


def test_the_weight_of_an_only_choice_is_one() -> None:
    logits = torch.randn(333, 20, device="cuda", requires_grad=True)
    weights = route_weights(logits, logits.detach().topk(1).indices)
    torch.testing.assert_close(weights, torch.ones_like(weights))
    weights.backward(torch.randn_like(weights))
    assert logits.grad is not None
    assert float(logits.grad.abs().max()) < 1e-6


def test_cross_entropy(alone: dist.ProcessGroup) -> None:
    labels = torch.randint(163_840, (2000,), device="cuda")
    labels[::7] = -100
    inputs = [bf16(2000, 64) * 0.3, bf16(163_840, 64) * 0.3]
    compare(lambda h, w: cross_entropy(h, w, labels, alone), inputs, tolerance=1e-2)
