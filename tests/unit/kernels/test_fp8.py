"""FP8 products where there is no GPU: what is refused, what stays as it is, which projections are asked."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from k3train.__main__ import main
from k3train.config.problems import Unavailable
from k3train.config.schema import Fp8
from k3train.kernels import fp8
from k3train.kernels.linear import _Plain, linears
from tests import model_step
from tests.parity.test_model import BORDERS, MODEL, randomise
from tests.ranks import run_ranks

CUDA = torch.device("cuda", 0)
ROUNDED = frozenset(
    "q_proj k_proj v_proj g_proj o_proj q_a q_b kv_a kv_b gate_proj up_proj down_proj latent_down latent_up "
    "projection".split()
)
"""Modules whose products are rounded; the last is MTP's."""


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "old")


def test_no_gpu_is_said_before_ranks_start(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    asked = ["experiment=debug_gpu", "device=auto", "model.fp8=tensorwise", f"dir={tmp_path}/run"]
    assert main(["train", *asked]) == 3
    said = capsys.readouterr().err
    assert "model.fp8=tensorwise" in said
    assert "set model.fp8=none" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("recipe", "capability", "words"),
    [
        (
            Fp8.tensorwise,
            (8, 0),
            "8.9 (Ada, Hopper or Blackwell), and this one is old: set model.fp8=none",
        ),
        (Fp8.blockwise, (8, 9), "9.0 (Hopper), and this one is old: set model.fp8=tensorwise or"),
        (Fp8.mxfp8, (9, 0), "10.0 (Blackwell), and this one is old: set model.fp8=tensorwise or"),
    ],
)
def test_a_gpu_that_lacks_it(
    monkeypatch: pytest.MonkeyPatch, recipe: Fp8, capability: tuple[int, int], words: str
) -> None:
    pretend(monkeypatch, capability)
    with pytest.raises(Unavailable) as refused:
        fp8.check(recipe, CUDA)
    assert words in str(refused.value)
    assert f"model.fp8={recipe.value}" in str(refused.value)


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (9, 0))
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    fp8.products.cache_clear()
    with pytest.raises(Unavailable, match=r"pip install 'k3train\[te\]', or set model.fp8=none"):
        fp8.check(Fp8.blockwise, CUDA)
    fp8.check(Fp8.none, torch.device("cpu"))


def test_an_old_package(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (9, 0))
    monkeypatch.setattr(fp8, "version", lambda name: "2.9.0+abc")
    fp8.products.cache_clear()
    with pytest.raises(Unavailable, match=r"\(2\.9\.0\+abc is older than 2\.20\): pip install"):
        fp8.check(Fp8.tensorwise, CUDA)


def test_on_the_cpu_a_recipe_changes_nothing() -> None:
    x, weights = torch.randn(32, 16), [torch.randn(m, 16) for m in (32, 16, 3)]
    for a, b in zip(linears(x, weights, Fp8.tensorwise, exact=1), linears(x, weights), strict=True):
        assert torch.equal(a, b)


class Seen(_Plain):
    """Plain products that note the weights they are taken with."""

    def __init__(self) -> None:
        self.weights: set[int] = set()

    def output(self, rows: Tensor, weight: Tensor) -> Tensor:
        self.weights.add(weight.data_ptr())
        return super().output(rows, weight)


def everywhere(chunk: Any = None) -> Seen:
    """From now on this process takes plain products as FP8 ones, with any operands."""
    seen = Seen()
    fp8.fits = lambda recipe, x, weight: recipe is not Fp8.none
    fp8.products = lambda recipe: seen  # type: ignore[assignment]
    return seen


def rounded_modules(rank: int) -> set[str]:
    seen = everywhere()
    chunks, groups = model_step.build(replace(MODEL, fp8=Fp8.tensorwise), {}, randomise)
    names = {p.data_ptr(): name.split(".")[-2] for name, p in chunks[0].named_parameters() if "." in name}
    micro = model_step.make_micro(BORDERS, MODEL.vocab_size, 0)
    chunks[0](
        micro.tokens[None],
        model_step.packing(micro, groups),
        labels=micro.labels[None],
        labels_mtp=micro.labels_mtp[None],
    )
    return {names[each] for each in seen.weights}


def test_dense_projections_are_rounded_and_nothing_else() -> None:
    (found,) = run_ranks(1, rounded_modules)
    assert found == ROUNDED


def also_everywhere(chunk: Any) -> None:
    randomise(chunk)
    everywhere()


def test_their_path_through_tensor_parallel_ranks_gives_the_same_gradients() -> None:
    micro = model_step.make_micro((0, 1, 6, 7, 25, 44, 48), MODEL.vocab_size, 0)
    one = model_step.step(MODEL, [micro], prepare=randomise)
    model = replace(MODEL, fp8=Fp8.tensorwise)
    two = model_step.step(model, [micro], one.weights, prepare=also_everywhere, tp=2)
    assert two.loss == pytest.approx(one.loss, rel=1e-6)
    for key, want in one.gradients.items():
        assert float((two.gradients[key] - want).norm()) <= 1e-5 * float(want.norm()), key
