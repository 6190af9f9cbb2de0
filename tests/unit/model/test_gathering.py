"""Layers in models whose optimizer gathers parameters while the forward pass runs."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig

from k3train.config import schema
from k3train.config.schema import Kda, Situ
from k3train.model.kda import KdaAttention
from k3train.model.mlp import SituMlp
from k3train.parallel.groups import start_groups
from k3train.parallel.layout import make_layout
from tests.ranks import run_ranks


class _Layers(torch.nn.Module):
    def __init__(self, config: Any, groups: Any) -> None:
        super().__init__()
        self.attention = KdaAttention(config, 1, groups, settings=Kda(head_dim=8, decay_rank=4))
        self.ffn = SituMlp(config, 32, groups, settings=Situ())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ffn(self.attention(x)[0])[0]


def stale(rank: int) -> list[str]:
    """Parameters that a forward pass read before what other ranks have of them had come."""
    groups = start_groups(make_layout(schema.Model(), schema.Parallel(), 2), seed=5).pg
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2)
    layers = _Layers(config, groups)
    how = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        bucket_size=1,  # every parameter is gathered by itself
    )
    wrapped = DistributedDataParallel(config, how, layers, pg_collection=groups)
    x = torch.randn(8, 1, 16, generator=torch.Generator().manual_seed(0))
    # each rank's optimizer has changed its own share
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.full_like(parameter, 0.01 * (1 + rank)))
    wrapped(x)
    found = [p.clone() for p in layers.parameters()]
    wrapped.start_param_sync(force_sync=True)
    names = [name for name, _ in layers.named_parameters()]
    return [n for n, p, f in zip(names, layers.parameters(), found, strict=True) if not torch.equal(p, f)]


def test_layers_wait_for_parameters_that_are_on_their_way() -> None:
    assert run_ranks(2, stale) == [[], []]
