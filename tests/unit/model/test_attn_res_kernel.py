"""The mix over depth and the RMSNorm: formulas, gradients, dtypes and what they keep for backward."""

from __future__ import annotations

import pytest
import torch

from k3train.kernels.attn_res import mix, mix_reference
from k3train.kernels.rms_norm import rms_norm


def _inputs(w: int, dtype=torch.float64):
    sources = [torch.randn(3, 2, 8, dtype=dtype, requires_grad=True) for _ in range(w)]
    wide = torch.promote_types(dtype, torch.float32)
    return sources, *(torch.randn(8, dtype=wide, requires_grad=True) for _ in range(2))


@pytest.mark.parametrize("w", [2, 3, 9])
def test_mix_equals_its_formula_and_gradient(w):
    sources, query, norm = _inputs(w)
    inputs = [query, norm, *sources]
    direction = torch.randn(3, 2, 8, dtype=torch.float64)
    for function in (mix, mix_reference):
        out = function(sources, query, norm, 1e-5)
        results = (out, *torch.autograd.grad(out, inputs, direction))
        if function is mix:
            got = results
    for a, b in zip(got, results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_mix_passes_a_finite_difference_check():
    sources, query, norm = _inputs(3)
    assert torch.autograd.gradcheck(lambda q, n, *s: mix(list(s), q, n, 1e-5), (query, norm, *sources))


def test_zero_query_is_the_mean():
    sources, query, norm = _inputs(4)
    out = mix(sources, torch.zeros_like(query), norm, 1e-5)
    torch.testing.assert_close(out, torch.stack(sources).mean(0))


def test_one_source_is_returned_and_its_parameters_get_zero_gradients():
    (source,), query, norm = _inputs(1)
    out = mix([source], query, norm, 1e-5)
    torch.testing.assert_close(out, source, rtol=0, atol=0)
    out.sum().backward()
    assert query.grad is not None
    assert norm.grad is not None
    assert not query.grad.any()
    assert not norm.grad.any()
    torch.testing.assert_close(source.grad, torch.ones_like(source))


def test_bf16_sources_are_mixed_in_fp32():
    sources, query, norm = _inputs(5, torch.bfloat16)
    out = mix(sources, query, norm, 1e-5)
    wide = mix_reference([s.double() for s in sources], query.double(), norm.double(), 1e-5)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, wide.bfloat16(), rtol=1e-2, atol=0)
    out.sum().backward()
    assert query.grad is not None
    assert (query.grad.dtype, sources[0].grad.dtype) == (torch.float32, torch.bfloat16)


def test_mix_keeps_only_its_sources_for_backward():
    sources, query, norm = _inputs(6)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        mix(sources, query, norm, 1e-5)
    assert set(kept) == {t.data_ptr() for t in (query, norm, *sources)}


@pytest.mark.gpu
@pytest.mark.parametrize(("w", "channels"), [(1, 64), (2, 7168), (9, 7168), (3, 100)])
def test_on_the_gpu(w, channels):
    wide = [torch.randn(40, 1, channels, device="cuda") for _ in range(w)]
    payload = torch.cat(wide, -1).bfloat16().requires_grad_()
    query, norm = (torch.randn(channels, device="cuda", requires_grad=True) for _ in range(2))
    direction = torch.randn(40, 1, channels, device="cuda")
    results = []
    for function, dtype in ((mix, torch.bfloat16), (mix_reference, torch.float64)):
        sources = list(payload.to(dtype).split(channels, -1))
        out = function(
            sources,
            query.to(torch.promote_types(dtype, query.dtype)) * 0.02,
            norm.double().float() if dtype is torch.bfloat16 else norm.double(),
            1e-5,
        )
        results.append((out, *torch.autograd.grad(out, (payload, query, norm), direction.to(dtype))))
    for got, want in zip(*results, strict=True):
        assert (got.double() - want.double()).norm() <= 1e-2 * want.double().norm() + 1e-6


def test_rms_norm_equals_torch_and_keeps_fp32_weights():
    x = torch.randn(4, 3, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(16, dtype=torch.float64, requires_grad=True)
    direction = torch.randn_like(x)
    got = rms_norm(x, weight, 1e-5)
    want = torch.nn.functional.rms_norm(x, (16,), weight, 1e-5)
    torch.testing.assert_close(got, want)
    for a, b in zip(
        torch.autograd.grad(got, (x, weight), direction),
        torch.autograd.grad(want, (x, weight), direction),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    narrow, weight = x.detach().bfloat16().requires_grad_(), torch.ones(16, requires_grad=True)
    out = rms_norm(narrow, weight, 1e-5)
    out.sum().backward()
    assert weight.grad is not None
    assert (out.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)
