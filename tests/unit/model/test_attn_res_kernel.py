"""The mix over depth and the RMSNorm: formulas, gradients, dtypes and what they keep for backward."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from k3train.kernels.attn_res import mix, mix_reference
from k3train.kernels.rms_norm import rms_norm
from tests.interpreted import needs_triton


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


def test_no_tokens():
    sources = [torch.zeros(0, 8, requires_grad=True) for _ in range(3)]
    out = mix(sources, torch.ones(8), torch.ones(8), 1e-5)
    out.sum().backward()
    assert (out.shape, sources[0].grad.shape) == ((0, 8), (0, 8))


H200 = {"major": 9, "shared_memory_per_multiprocessor": 233_472}
A100 = {"major": 8, "shared_memory_per_multiprocessor": 167_936}


@needs_triton
@pytest.mark.parametrize(
    ("channels", "w", "changed", "device", "programs"),
    [
        (7168, 9, {}, H200, 1),
        (7168, 12, {}, H200, 1),
        (7168, 13, {}, H200, 0),  # no room for their slots
        (7168, 9, {}, A100, 0),
        (7168, 7, {}, A100, 1),
        (2048, 9, {}, H200, 4),
        (2048, 20, {}, H200, 2),
        (64, 3, {}, H200, 8),
        (12288, 2, {}, H200, 0),
        (2040, 3, {}, H200, 0),  # 16 does not divide it
        (2048, 3, {"stride": 2056}, H200, 0),
        (2048, 3, {"stride": 4096}, H200, 4),
        (2048, 3, {"offset": 4}, H200, 0),
        (2048, 3, {"dtype": torch.float32}, H200, 0),
        (2048, 3, {}, H200 | {"major": 7}, 0),
        (2048, 3, {}, None, 0),
        (2048, 3, {"hip": "6.4"}, H200, 0),
    ],
)
def test_which_backward_pass_is_taken(monkeypatch, channels, w, changed, device, programs):
    from k3train.kernels import triton_mix

    monkeypatch.setattr(torch.version, "hip", changed.get("hip"))
    tensors = [torch.empty(3, channels, dtype=torch.bfloat16) for _ in range(w + 2)]
    room = torch.empty(20_000, dtype=changed.get("dtype", torch.bfloat16))
    strides, offset = (changed.get("stride", channels), 1), changed.get("offset", 0)
    tensors[-1] = room.as_strided((3, channels), strides, offset) if changed else tensors[-1]
    given = SimpleNamespace(**device) if device else None
    assert triton_mix.programs_with_slots(tensors, given) == programs


def _on_the_gpu(function, sources, query, norm, grad):
    leaves = [x.detach().requires_grad_() for x in (query, norm, *sources)]
    out = function(leaves[2:], *leaves[:2], 1e-5)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


@pytest.mark.gpu
@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("logits", [1.0, 10.0])  # saturated: one source has all the weight
@pytest.mark.parametrize(
    ("n", "w", "channels"),
    [
        (1, 9, 7168),
        (133, 9, 7168),
        (700, 10, 7168),  # more than one round of tokens
        (300, 14, 7168),  # no room for slots
        (133, 1, 7168),
        (1500, 4, 2048),
        (300, 20, 2048),
        (133, 3, 77),
        (133, 5, 64),
        (40, 3, 12288),
        (0, 3, 2048),
    ],
)
def test_on_the_gpu(n, w, channels, logits, apart):
    payload = torch.randn(n, 1, w * channels, device="cuda").bfloat16()
    sources = [s.clone() if apart else s for s in payload.split(channels, -1)]
    query = torch.randn(channels, device="cuda") * logits / channels**0.5
    norm = 1 + torch.randn(channels, device="cuda") / 10
    grad = torch.randn(n, 1, channels, device="cuda").bfloat16()
    got, again = (_on_the_gpu(mix, sources, query, norm, grad) for _ in range(2))
    inputs = query.double(), norm.double(), grad.double()
    want = _on_the_gpu(mix_reference, [s.double() for s in sources], *inputs)
    for i, (a, b, c) in enumerate(zip(got, want, again, strict=True)):
        allowed = (1e-2 if logits == 1 else 3e-2) * b.norm()
        if i in (1, 2) and logits > 1:
            # what saturated weights have of their query's gradient is small beside the rounding of grad . out
            factor = (norm, query)[i - 1]
            allowed += 2**-8 * n**0.5 * channels * factor.square().mean().sqrt()
        assert (a.double() - b).norm() <= allowed, i
        assert torch.equal(a, c), i


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "w", "channels"), [(200, 9, 7168), (1000, 4, 2048), (77, 2, 256)])
def test_backward_passes_agree_on_the_gpu(monkeypatch, n, w, channels):
    from k3train.kernels import triton_mix

    grad, *sources = (torch.randn(n, channels, device="cuda").bfloat16() for _ in range(w + 1))
    direction = torch.randn(channels, device="cuda") / channels**0.5
    inputs = sources, direction, *triton_mix.forward(sources, direction, 1e-5), 1e-5
    device = torch.cuda.get_device_properties(0)
    if not triton_mix.programs_with_slots([grad, inputs[2], *sources], device):
        pytest.skip("this GPU takes the plain kernel")
    got = triton_mix.backward(grad, *inputs)
    monkeypatch.setattr(triton_mix, "programs_with_slots", lambda tensors, device: 0)
    want = triton_mix.backward(grad, *inputs)
    for a, b in zip((got[0], *got[1]), (want[0], *want[1]), strict=True):
        assert (a.double() - b.double()).norm() < 1e-4 * b.double().norm()


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


def test_sources_may_come_one_by_one():
    sources, query, norm = _inputs(3)
    assert torch.equal(mix(iter(sources), query, norm, 1e-5), mix(sources, query, norm, 1e-5))


def test_a_norm_weight_that_would_be_spread_is_refused():
    sources, query, norm = _inputs(2)
    with pytest.raises(ValueError, match=r"query has shape \(8,\) and norm_weight \(1,\): mix needs \[c\]"):
        mix(sources, query, norm[:1], 1e-5)
