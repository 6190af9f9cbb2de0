"""Newton-Schulz against plain loops and against singular values."""

from __future__ import annotations

import pytest
import torch

from k3train.config.schema import NewtonSchulz
from k3train.optim.newton_schulz import COEFFICIENTS, orthogonalise

SHAPES = [(3, 16, 40), (2, 40, 16), (1, 7, 7)]


def plain(x: torch.Tensor, triples: list[tuple[float, float, float]]) -> torch.Tensor:
    x = x.double() / x.double().norm()
    for a, b, c in triples:
        x = a * x + b * (x @ x.T @ x) + c * (x @ x.T @ x @ x.T @ x)
    return x


@pytest.mark.parametrize("kind", list(NewtonSchulz))
@pytest.mark.parametrize("shape", SHAPES)
def test_each_matrix_of_a_batch_is_what_plain_loops_give(kind: NewtonSchulz, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1e-3
    triples = list(COEFFICIENTS[kind])
    for steps in (1, 5, 9):
        repeated = [*triples, *([triples[-1]] * 9 if kind is NewtonSchulz.polar_express else triples * 9)]
        got = orthogonalise(x, kind, steps, torch.float32)
        want = torch.stack([plain(each, repeated[:steps]) for each in x])
        torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "low", "high"),
    [
        (NewtonSchulz.simple, 0.65, 1.25),
        (NewtonSchulz.quintic, 0.65, 1.2),
        (NewtonSchulz.polar_express, 0.8, 1.2),
    ],
)
def test_singular_values_come_near_one_and_singular_vectors_stay(
    kind: NewtonSchulz, low: float, high: float
) -> None:
    generator = torch.Generator().manual_seed(1)
    u = torch.linalg.qr(torch.randn(24, 8, generator=generator))[0]
    v = torch.linalg.qr(torch.randn(8, 8, generator=generator))[0]
    values = torch.logspace(0, -1.5, 8)
    out = orthogonalise((u * values @ v.T)[None], kind, 5, torch.float32)[0]
    inner = u.T @ out @ v  # diagonal when the vectors stayed
    assert torch.allclose(inner, inner.diagonal().diag(), atol=1e-5)
    assert low < float(inner.diagonal().min()) < float(inner.diagonal().max()) < high


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(3, 128, 512), (2, 512, 128)])
def test_a_gpu_gives_what_the_cpu_gives(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    want = orthogonalise(x, NewtonSchulz.simple, 5, torch.float32)
    for dtype, tolerance in ((torch.float32, 1e-2), (torch.bfloat16, 5e-2)):
        got = orthogonalise(x.cuda(), NewtonSchulz.simple, 5, dtype).float().cpu()
        assert float((got - want).norm() / want.norm()) < tolerance


def test_bf16_is_close_and_zero_stays_zero() -> None:
    x = torch.randn(2, 12, 30, generator=torch.Generator().manual_seed(2))
    fine = orthogonalise(x, NewtonSchulz.simple, 5, torch.float32)
    coarse = orthogonalise(x, NewtonSchulz.simple, 5, torch.bfloat16)
    assert coarse.dtype is torch.bfloat16
    torch.testing.assert_close(coarse.float(), fine, rtol=0, atol=2e-2)
    assert not orthogonalise(torch.zeros(1, 4, 6), NewtonSchulz.simple, 5, torch.float32).any()
