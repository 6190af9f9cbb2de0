"""Who writes what of a checkpoint, against megatron-core's own division, over more ranks than tests start."""

from __future__ import annotations

from collections import Counter

import pytest
from megatron.core.dist_checkpointing.exchange_utils import distribute_shards_to_ranks

from k3train.config.schema import Model, Parallel
from k3train.optim.written import most_written
from k3train.parallel.layout import Layout, make_layout, rank_coordinates

DENSE = [500, 120, 120, 80, 7, 7, 7, 3, 1, 1]
EXPERTS = [90, 90, 30, 30, 30]


def by_megatron(layout: Layout) -> int:
    """Most bytes of a rank in the data-parallel group of the first ranks, which writes what tensor-parallel
    ranks hold alike."""
    places = {rank: rank_coordinates(layout, rank) for rank in range(layout.world)}
    group = [rank for rank, at in places.items() if at.tp == at.pp == 0]
    holders = {("dense", i): list(range(len(group))) for i in range(len(DENSE))}
    sizes = {("dense", i): size for i, size in enumerate(DENSE)}
    first = {(at.ep, at.etp) for at in map(places.__getitem__, group) if at.expert_dp == 0}
    for part in first:
        own = [i for i, rank in enumerate(group) if (places[rank].ep, places[rank].etp) == part]
        for i, size in enumerate(EXPERTS):
            holders[f"experts {part}", i], sizes[f"experts {part}", i] = own, size
    written: Counter[int] = Counter()
    for shard, rank in distribute_shards_to_ranks(holders, sizes, len(group), set()).items():
        written[rank] += sizes[shard]
    return max(written.values())


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (1, Parallel()),
        (16, Parallel()),
        (16, Parallel(cp=4)),
        (16, Parallel(ep=16)),
        (32, Parallel(pp=2, ep=4)),
        (32, Parallel(tp=2, ep=8)),
        (32, Parallel(tp=4, ep=2)),
        (32, Parallel(tp=4, ep=4, etp=2)),
        (32, Parallel(tp=2, pp=2, cp=2, ep=4, etp=2)),
    ],
    ids=str,
)
def test_the_rank_that_writes_most(world: int, parallel: Parallel) -> None:
    model = Model(num_layers=4)
    model.moe.num_experts = 16
    layout = make_layout(model, parallel, world)
    assert most_written(DENSE, EXPERTS, layout) == by_megatron(layout)
