"""Sorting routes by expert, and the way there and back."""

import pytest
import torch

from k3train.kernels.permute import permute, sort_routes, sort_weights, unpermute


def test_rows_are_sorted_by_expert_then_token():
    experts = torch.tensor([[2, 0], [1, 2], [0, 2]])
    rows = permute(torch.tensor([[10.0], [11.0], [12.0]]), sort_routes(experts, 3))
    assert rows.flatten().tolist() == [10, 12, 11, 10, 11, 12]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("tokens", "top_k", "width"), [(1, 1, 4), (33, 5, 24), (0, 2, 8), (7, 3, 1500)])
def test_values_and_gradients_are_those_of_indexing(device, tokens, top_k, width):
    dtype = torch.float64 if device == "cpu" else torch.float32
    experts = torch.rand(tokens, 8).topk(top_k).indices.to(device)
    order = sort_routes(experts, 8)
    assert order.counts.tolist() == torch.bincount(experts.flatten(), minlength=8).tolist()
    x = torch.randn(tokens, width, dtype=dtype, device=device, requires_grad=True)
    again = x.detach().clone().requires_grad_()
    scale = torch.randn(tokens * top_k, 1, dtype=dtype, device=device)
    direction = torch.randn(tokens, width, dtype=dtype, device=device)
    out = unpermute(permute(x, order) * scale, order)
    (out * direction).sum().backward()
    token = order.source // top_k
    expected = torch.zeros_like(again).index_add(0, token, again[token] * scale)
    (expected * direction).sum().backward()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(x.grad, again.grad)


def test_bf16_rows_are_summed_in_fp32():
    """In bf16, adding 2^-9 to 1 rounds it away each time."""
    order = sort_routes(torch.arange(5)[None], 5)
    rows = torch.full((5, 1), 2.0**-9, dtype=torch.bfloat16)
    rows[0] = 1
    assert unpermute(rows, order).item() == 1 + 2.0**-7


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_weights_follow_their_rows(device):
    experts = torch.rand(40, 8).topk(3).indices.to(device)
    order = sort_routes(experts, 8)
    weights = torch.rand(40, 3, device=device, requires_grad=True)
    out = sort_weights(weights, order)
    assert torch.equal(out, weights.flatten()[order.source])
    grad = torch.rand_like(out)
    out.backward(grad)
    assert weights.grad is not None
    assert torch.equal(weights.grad.flatten()[order.source], grad)
