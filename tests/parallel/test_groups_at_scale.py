"""Groups of layouts for 512 to 10,240 ranks, made by megatron-core without any of the other ranks."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from k3train.config.schema import Model, Moe, Parallel
from k3train.parallel.groups import start_groups, stop_groups
from k3train.parallel.layout import Coordinates, Layout, make_layout, rank_coordinates
from tests.ranks import run_ranks

K3 = Model(num_layers=93, num_heads=96, moe=Moe(num_experts=896))
LAYOUTS = {
    512: Parallel(tp=2, pp=8, cp=4, ep=32),
    1024: Parallel(tp=4, pp=4, vp=6, cp=8, ep=64, etp=2),
    4096: Parallel(tp=2, pp=8, vp=3, cp=16, ep=32),
    10_240: Parallel(tp=4, pp=4, vp=6, cp=8, ep=64),
}
VARIES = {
    "tp": {"tp"},
    "cp": {"cp"},
    "dp": {"dp"},
    "pp": {"pp"},
    "dp_cp": {"dp", "cp"},
    "tp_cp": {"tp", "cp"},
    "mp": {"tp", "pp"},
    "ep": {"ep"},
    "expt_tp": {"etp"},
    "expt_dp": {"expert_dp"},
    "tp_ep": {"etp", "ep"},
    "tp_ep_pp": {"etp", "ep", "pp"},
    "tokens": {"tp", "cp", "dp"},
}
"""By which coordinates the members of a group differ."""
DENSE, EXPERT = ("tp", "cp", "dp", "pp"), ("etp", "ep", "expert_dp", "pp")


def _members(_: int, world: int, ranks: list[int]) -> dict[int, dict[str, list[int]]]:
    """Members of every group that each of ``ranks`` is in; each rank stands alone in a fake world."""
    layout = make_layout(K3, LAYOUTS[world], world)
    found = {}
    for rank in ranks:
        dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        groups = start_groups(layout, seed=1)
        place = rank_coordinates(layout, rank)
        own = (groups.tp_rank, groups.cp_rank, groups.dp_rank, groups.pp_rank, groups.ep_rank)
        assert own == (place.tp, place.cp, place.dp, place.pp, place.ep)
        each = {name: getattr(groups.pg, name, None) for name in VARIES}
        each["tokens"] = groups.tokens
        found[rank] = {name: dist.get_process_group_ranks(group) for name, group in each.items()}
        found[rank]["embd"] = dist.get_process_group_ranks(groups.pg.embd) if groups.pg.embd else []
        stop_groups()
    return found


def _expected(layout: Layout, places: list[Coordinates], rank: int, varies: set[str]) -> list[int]:
    same = [name for name in (DENSE if varies <= set(DENSE) else EXPERT) if name not in varies]
    key = [getattr(places[rank], name) for name in same]
    return [other for other, p in enumerate(places) if [getattr(p, name) for name in same] == key]


@pytest.mark.parametrize(
    ("world", "ranks"), [(512, [0, 77, 511]), (1024, [5, 700]), (4096, [2049]), (10_240, [7777])], ids=str
)
def test_groups_are_those_of_the_arithmetic(world: int, ranks: list[int]) -> None:
    layout = make_layout(K3, LAYOUTS[world], world)
    places = [rank_coordinates(layout, rank) for rank in range(world)]
    for rank, found in run_ranks(1, _members, world, ranks)[0].items():
        for name, varies in VARIES.items():
            assert found[name] == _expected(layout, places, rank, varies), (rank, name)
        pipeline = _expected(layout, places, rank, {"pp"})
        ends = [pipeline[0], pipeline[-1]]
        assert found["embd"] == (ends if rank in ends else [])
