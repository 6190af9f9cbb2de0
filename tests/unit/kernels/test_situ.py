"""SiTU-GLU against published vectors, its formula and finite differences."""

import pytest
import torch

from k3train.kernels.situ import situ_glu

VECTORS = [
    (0.5, 0.5, 0.154789),
    (1.0, 2.0, 1.429351),
    (-2.0, 3.0, -0.657874),
    (10.0, 10.0, 37.484606),
    (100.0, 100.0, 99.93293),
    (-10.0, 50.0, -0.004318),
]


def formula(gate, up, gate_cap, up_cap):
    return gate_cap * torch.tanh(gate / gate_cap) * torch.sigmoid(gate) * up_cap * torch.tanh(up / up_cap)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_published_vectors(dtype):
    gate, up, expected = torch.tensor(VECTORS, dtype=dtype).unbind(1)
    torch.testing.assert_close(situ_glu(gate, up, 4.0, 25.0), expected, atol=2e-6, rtol=1e-6)


def test_bf16_is_computed_in_fp32_and_rounded_once():
    gate, up = (torch.randn(64, 32).mul(8).bfloat16() for _ in range(2))
    out = situ_glu(gate, up, 4.0, 25.0)
    assert out.dtype is torch.bfloat16
    assert torch.equal(out, formula(gate.float(), up.float(), 4.0, 25.0).bfloat16())


def test_gradients_match_finite_differences():
    gate, up = (torch.randn(5, 3, dtype=torch.float64).mul(6).requires_grad_() for _ in range(2))
    weight = torch.rand(5, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda g, u: situ_glu(g, u, 4.0, 25.0), (gate, up))
    assert torch.autograd.gradcheck(lambda g, u, w: situ_glu(g, u, 3.0, 9.0, w), (gate, up, weight))


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_row_weight_scales_rows_and_gets_its_gradient(rows):
    gate, up, weight = torch.randn(rows, 4), torch.randn(rows, 4), torch.rand(rows)
    inputs = [t.clone().requires_grad_() for t in (gate, up, weight)]
    again = [t.clone().requires_grad_() for t in (gate, up, weight)]
    out = situ_glu(inputs[0], inputs[1], 4.0, 25.0, inputs[2])
    expected = formula(again[0], again[1], 4.0, 25.0) * again[2][:, None]
    torch.testing.assert_close(out, expected)
    direction = torch.randn(rows, 4)
    (out * direction).sum().backward()
    (expected * direction).sum().backward()
    for mine, theirs in zip(inputs, again, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_large_inputs_stay_finite_and_bounded():
    gate = torch.tensor([-1e30, -80.0, 80.0, 1e30]).requires_grad_()
    up = torch.tensor([1e30, -1e30, 1e30, -1e30]).requires_grad_()
    out = situ_glu(gate, up, 4.0, 25.0)
    out.sum().backward()
    assert torch.isfinite(out).all()
    assert out.abs().max() <= 100
    assert torch.isfinite(gate.grad).all()
    assert torch.isfinite(up.grad).all()


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [64, 1000, 3072])
@pytest.mark.parametrize("weighted", [False, True])
def test_bf16_kernel_matches_fp32_formula_on_the_gpu(channels, weighted):
    scale = torch.logspace(-5, 2, 40, device="cuda")[:, None]
    inputs = [
        (torch.randn(40, channels, device="cuda") * scale).bfloat16().requires_grad_() for _ in range(2)
    ]
    if weighted:
        inputs.append(torch.rand(40, device="cuda").requires_grad_())
    wide = [t.detach().double().requires_grad_() for t in inputs]
    out = situ_glu(inputs[0], inputs[1], 4.0, 25.0, *inputs[2:])
    expected = situ_glu(wide[0], wide[1], 4.0, 25.0, *wide[2:])
    direction = torch.randn_like(out)
    mine = torch.autograd.grad(out, inputs, direction)
    theirs = torch.autograd.grad(expected, wide, direction.double())
    for found, right in zip((out, *mine), (expected, *theirs), strict=True):
        torch.testing.assert_close(found.double(), right, rtol=2**-8, atol=1e-6 * float(right.abs().max()))


@pytest.mark.parametrize(
    ("gate", "up", "weight"), [((4, 8), (4, 4), None), ((4, 8), (4, 1), None), ((4, 8), (4, 8), (4, 1))]
)
def test_shapes_that_do_not_belong_together_are_refused(gate, up, weight):
    given = [torch.randn(gate), torch.randn(up), None if weight is None else torch.randn(weight)]
    with pytest.raises(ValueError, match=r"gate has shape \(4, 8\), up .*: situ_glu needs gate and up"):
        situ_glu(given[0], given[1], 4.0, 25.0, given[2])
