"""Collectives on real ranks against slices of the global tensor, forward and gradient."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from k3train.parallel.collectives import all_gather, all_to_all
from tests.ranks import run_ranks


def _gather(rank: int):
    x = torch.arange(6.0).reshape(3, 2).add(10 * rank).requires_grad_()
    out = all_gather(x, dist.group.WORLD)
    out.mul(torch.arange(out.numel()).reshape(out.shape) * (rank + 1.0)).sum().backward()
    return out.detach(), x.grad


def test_gather_joins_in_rank_order_and_sums_gradients():
    results = run_ranks(2, _gather)
    whole = torch.cat([torch.arange(6.0).reshape(3, 2) + 10 * r for r in range(2)])
    weight = torch.arange(12.0).reshape(6, 2) * 3
    for rank, (out, grad) in enumerate(results):
        torch.testing.assert_close(out, whole)
        torch.testing.assert_close(grad, weight[3 * rank : 3 * rank + 3])


def _swap(rank: int, whole: torch.Tensor, split: int, concat: int):
    n = dist.get_world_size()
    x = whole.chunk(n, concat)[rank].clone().requires_grad_()
    out = all_to_all(x, dist.group.WORLD, split_dim=split, concat_dim=concat)
    out.square().sum().backward()
    return out.detach(), x.grad


@pytest.mark.parametrize(("split", "concat"), [(1, 0), (0, 1), (2, 1)])
def test_all_to_all_moves_the_sharded_axis(split, concat):
    whole = torch.randn(6, 3, 9)
    for rank, (out, grad) in enumerate(run_ranks(3, _swap, whole, split, concat)):
        torch.testing.assert_close(out, whole.chunk(3, split)[rank])
        torch.testing.assert_close(grad, 2 * whole.chunk(3, concat)[rank])
