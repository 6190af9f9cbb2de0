"""Chunked vocabulary-parallel cross entropy against torch's, on one and two ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from k3train.kernels import cross_entropy as kernel
from k3train.kernels.cross_entropy import cross_entropy
from tests.ranks import run_ranks


def _inputs():
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(11, 6, generator=generator, dtype=torch.float64) * 3
    weight = torch.randn(10, 6, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 9, 4, -100, 5, 5, -100, 1, 8, 3, 7], dtype=torch.int32)
    return hidden, weight, labels, torch.randn(11, generator=generator, dtype=torch.float64)


def _run(rank: int, elements: int):
    kernel.CHUNK_ELEMENTS = elements
    hidden, weight, labels, direction = _inputs()
    hidden.requires_grad_()
    weight = weight.chunk(dist.get_world_size())[rank].clone().requires_grad_()
    loss = cross_entropy(hidden, weight, labels, dist.group.WORLD)
    loss.backward(direction)
    dist.all_reduce(hidden.grad)
    return loss.detach(), hidden.grad, weight.grad


def test_equals_torch_on_any_chunking_and_sharding():
    hidden, weight, labels, direction = _inputs()
    hidden.requires_grad_()
    weight.requires_grad_()
    want = F.cross_entropy(hidden @ weight.T, labels.long(), ignore_index=-100, reduction="none")
    want.backward(direction)
    for ranks, elements in [(1, 2**20), (1, 30), (1, 1), (2, 15)]:
        results = run_ranks(ranks, _run, elements)
        for loss, grad_hidden, _ in results:
            torch.testing.assert_close(loss, want.detach())
            torch.testing.assert_close(grad_hidden, hidden.grad)
        torch.testing.assert_close(torch.cat([r[2] for r in results]), weight.grad)


def _bf16_memory(rank: int):
    kernel.CHUNK_ELEMENTS = 4 * 64
    hidden = torch.randn(32, 16).bfloat16().requires_grad_()
    weight = torch.randn(64, 16).bfloat16().requires_grad_()
    labels = torch.randint(64, (32,))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        loss = cross_entropy(hidden, weight, labels, dist.group.WORLD)
    loss.sum().backward()
    want = F.cross_entropy(hidden.float() @ weight.float().T, labels, reduction="none")
    return loss.detach(), want.detach(), kept, hidden.grad.dtype


def test_bf16_losses_are_fp32_and_no_logits_are_kept():
    loss, want, kept, dtype = run_ranks(1, _bf16_memory)[0]
    assert (loss.dtype, dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(loss, want, rtol=2e-2, atol=2e-2)
    assert max(kept) == 64 * 16
