"""Layouts: splits, coordinates against megatron-core's own groups, and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3train.config.merge import even_split, stage_parallel
from k3train.config.problems import ConfigError
from k3train.config.schema import Model, Moe, Parallel, StageParallel
from k3train.parallel.layout import (
    RANK_ORDER,
    Layout,
    chunk_layers,
    make_layout,
    rank_coordinates,
)

K3 = Model(num_layers=93, num_heads=96, moe=Moe(num_experts=896))
K3_SPLIT = [*[4] * 23, 1]

LAYOUTS = [
    (1, Parallel()),
    (2, Parallel(cp=2)),
    (16, Parallel(tp=2, cp=2, pp=2, ep=4)),
    (16, Parallel(tp=2, pp=2, ep=2, etp=2)),
    (24, Parallel(tp=3, pp=2, ep=2, etp=3)),
    (512, Parallel(tp=2, pp=8, cp=4, ep=32)),
    (4096, Parallel(tp=2, pp=8, vp=3, cp=16, ep=32, pipeline_split=K3_SPLIT)),
    (10_240, Parallel(tp=4, pp=4, vp=6, cp=8, ep=64)),
]


def k3_layout(world: int, parallel: Parallel) -> Layout:
    model = K3 if parallel.tp != 3 else replace(K3, vocab_size=4095, dense_ffn_size=255, moe=replace(
        K3.moe, shared_ffn_size=63, expert_ffn_size=63))  # fmt: skip
    return make_layout(model, parallel, world)


@pytest.mark.parametrize(("world", "parallel"), LAYOUTS)
def test_coordinates_are_those_of_megatron_core(world: int, parallel: Parallel) -> None:
    from megatron.core.parallel_state import RankGenerator

    layout = k3_layout(world, parallel)
    places = [rank_coordinates(layout, rank) for rank in range(world)]
    dense = RankGenerator(tp=layout.tp, ep=1, dp=layout.dp, pp=layout.pp, cp=layout.cp, order=RANK_ORDER)
    expert = RankGenerator(
        tp=layout.etp, ep=layout.ep, dp=layout.expert_dp, pp=layout.pp, cp=1, order=RANK_ORDER
    )
    pairs = [(dense, name, name) for name in ("tp", "cp", "dp", "pp")]
    pairs += [(expert, "tp", "etp"), (expert, "ep", "ep"), (expert, "dp", "expert_dp"), (expert, "pp", "pp")]
    for generator, theirs, ours in pairs:
        for group in generator.get_ranks(theirs):
            assert [getattr(places[rank], ours) for rank in group] == list(range(len(group))), (theirs, group)


@pytest.mark.parametrize(("world", "parallel"), LAYOUTS)
def test_every_rank_has_its_own_place(world: int, parallel: Parallel) -> None:
    layout = k3_layout(world, parallel)
    places = [rank_coordinates(layout, rank) for rank in range(world)]
    assert layout.tp * layout.cp * layout.dp * layout.pp == world
    assert len({(p.tp, p.cp, p.dp, p.pp) for p in places}) == world
    assert len({(p.etp, p.ep, p.expert_dp, p.pp) for p in places}) == world


@given(st.integers(1, 200), st.integers(1, 16), st.integers(1, 6))
def test_chunks_tile_the_layers(layers: int, pp: int, vp: int) -> None:
    if pp * vp > layers or (vp > 1 and pp == 1):
        return
    layout = make_layout(Model(num_layers=layers), Parallel(pp=pp, vp=vp), pp)
    in_order = [chunk_layers(layout, position % pp, position // pp) for position in range(pp * vp)]
    assert [layer for chunk in in_order for layer in chunk] == list(range(layers))
    sizes = [len(chunk) for chunk in in_order]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True), "the last chunk has the head, so it is a shorter one"


def test_explicit_split_is_honoured() -> None:
    layout = k3_layout(8, Parallel(pp=8, vp=3, pipeline_split=K3_SPLIT))
    assert chunk_layers(layout, 0, 0) == range(4)
    assert chunk_layers(layout, 1, 2) == range(68, 72)
    assert chunk_layers(layout, 7, 2) == range(92, 93)


def test_even_split_of_k3() -> None:
    assert even_split(93, 8) == (12, 12, 12, 12, 12, 11, 11, 11)


def test_world_that_does_not_fit_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as error:
        make_layout(Model(num_layers=8), Parallel(pp=4, cp=2), 12)
    assert [problem.id for problem in error.value.problems] == ["parallel.world"]
    assert "8 or 16 ranks" in str(error.value)


@pytest.mark.parametrize("world", [0, -1])
def test_no_ranks(world: int) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        make_layout(Model(), Parallel(), world)


def test_zero_degree_is_a_problem_not_a_crash() -> None:
    with pytest.raises(ConfigError) as error:
        make_layout(Model(), Parallel(tp=0, pipeline_split=[5, 0]), 2)
    assert [problem.key for problem in error.value.problems] == ["parallel.tp", "parallel.pipeline_split.1"]


def test_stage_overrides_only_what_it_sets() -> None:
    run = Parallel(tp=2, pp=2, pipeline_split=[3, 2])
    assert stage_parallel(run, StageParallel()) == run
    assert stage_parallel(run, StageParallel(cp=4)) == replace(run, cp=4)


def test_stage_with_other_chunks_does_not_inherit_the_split() -> None:
    run = Parallel(pp=2, pipeline_split=[3, 2])
    assert stage_parallel(run, StageParallel(pp=1)).pipeline_split is None
    assert stage_parallel(run, StageParallel(pp=2)).pipeline_split == [3, 2]
    assert stage_parallel(run, StageParallel(pp=3, pipeline_split=[2, 2, 1])).pipeline_split == [2, 2, 1]
