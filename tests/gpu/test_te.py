"""Products through Transformer Engine on a GPU, against float64 of operands as they are and rounded."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from k3train.config.problems import Unavailable
from k3train.config.schema import Fp8
from k3train.kernels import fp8
from k3train.kernels.graphed import Graphed
from k3train.kernels.linear import linear, linears
from k3train.kernels.recompute import make_again
from tests.gpu.test_main_grad import error, with_buffers

pytestmark = pytest.mark.gpu
if torch.cuda.is_available():
    pytest.importorskip("transformer_engine")

RECIPES = [Fp8.tensorwise, Fp8.blockwise]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` as one scale for all of it lets FP8 hold it, float64."""
    scale = torch.finfo(dtype).max / x.float().abs().max()
    return (x.float() * scale).to(dtype).double() / scale.double()


def passed(recipe: Fp8, beside: bool):
    """Input, weights with something in their buffers, outputs, gradients of outputs."""
    torch.manual_seed(0)
    x = torch.randn(512, 1, 256, device="cuda").bfloat16().requires_grad_()
    weights = with_buffers([torch.randn(m, 256, device="cuda").bfloat16() for m in (512, 128, 256)], beside)
    before = [w.main_grad.double() for w in weights]  # type: ignore[attr-defined]
    outs = linears(x, weights, recipe)
    grads = [torch.randn_like(out) for out in outs]
    torch.autograd.backward(outs, grads)
    assert all(w.grad_added_to_main_grad for w in weights)  # type: ignore[attr-defined]
    sums = [w.main_grad - old for w, old in zip(weights, before, strict=True)]  # type: ignore[attr-defined]
    return x, weights, outs, grads, sums


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_those_of_the_operands_to_the_rounding_of_fp8(recipe: Fp8, beside: bool) -> None:
    """E4M3 rounds a value by 2.6 % in the mean square, E5M2 by 5.2 %, and a product has two."""
    x, weights, outs, grads, sums = passed(recipe, beside)
    rows, back = x.detach()[:, 0].double(), 0.07 if recipe is Fp8.tensorwise else 0.05
    for w, out, g, total in zip(weights, outs, grads, sums, strict=True):
        assert 0.01 < error(out[:, 0], rows @ w.double().T) < 0.05
        assert 0.01 < error(total, g[:, 0].double().T @ rows) < back
    want = sum(g[:, 0].double() @ w.double() for g, w in zip(grads, weights, strict=True))
    assert x.grad is not None
    assert 0.01 < error(x.grad[:, 0], want) < back  # pyright: ignore[reportArgumentType]


def test_products_of_the_rounded_operands_are_exact_to_their_sums() -> None:
    x, weights, outs, grads, sums = passed(Fp8.tensorwise, beside=False)
    rows = rounded(x.detach()[:, 0], E4M3)
    for w, out, g, total in zip(weights, outs, grads, sums, strict=True):
        assert error(out[:, 0], rows @ rounded(w.detach(), E4M3).T) < 5e-3  # bf16 outputs, short sums
        assert error(total, rounded(g[:, 0], E5M2).T @ rows) < 1e-3  # fp32


@pytest.mark.parametrize("recipe", RECIPES)
def test_exact_weights_and_odd_shapes_stay_bf16(recipe: Fp8) -> None:
    x = torch.randn(512, 256, device="cuda").bfloat16()
    weights = [torch.randn(m, 256, device="cuda").bfloat16() for m in (128, 72, 128)]
    got, want = linears(x, weights, recipe, exact=1), linears(x, weights)
    assert not torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[2], want[2])
    few = x[:3]
    assert torch.equal(linear(few, weights[0], recipe), linear(few, weights[0]))


@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputed_and_replayed_passes_are_the_same_numbers(recipe: Fp8) -> None:
    torch.manual_seed(0)

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(256, 256, device="cuda").bfloat16())

        def forward(self, x: Tensor, again: bool = False) -> Tensor:
            return make_again(torch.tanh, lambda h: linear(h, self.weight, recipe), x, on=again)

    part, start = Part(), torch.randn(512, 256, device="cuda").bfloat16()

    def run(function) -> tuple[Tensor, ...]:
        x, part.weight.grad = start.clone().requires_grad_(), None
        out = function(x * 1)
        out.backward(start)
        assert x.grad is not None
        assert part.weight.grad is not None
        return out.detach().clone(), x.grad.clone(), part.weight.grad.clone()

    want = run(part)
    graphed = Graphed([part], pool="part")
    for function in [partial(part, again=True)] + 3 * [partial(graphed, part)]:
        assert all(torch.equal(a, b) for a, b in zip(run(function), want, strict=True))
    assert [recording is not None for recording in graphed.recordings.values()] == [True]


def test_this_gpu_s_recipes() -> None:
    device = torch.device("cuda", 0)
    capability = torch.cuda.get_device_capability(device)
    if capability[0] != 9:
        pytest.skip("needs a Hopper GPU")
    for recipe in RECIPES:
        fp8.check(recipe, device)
    with pytest.raises(Unavailable, match=r"mxfp8 .*Blackwell.*set model.fp8=tensorwise or"):
        fp8.check(Fp8.mxfp8, device)
