"""The pipeline split by cost."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from k3train.config.compose import compose
from k3train.config.merge import even_split
from k3train.config.schema import Model, Mtp, Parallel, Recompute
from k3train.plan.counts import train_flops_per_token
from k3train.plan.recompute import RecomputePlan, recompute_plan
from k3train.plan.split import chunk_costs, cost_split, imbalance, layer_costs, resolved_parallel

NONE = recompute_plan(Parallel())
FULL = recompute_plan(Parallel(recompute=Recompute.full))


@pytest.mark.parametrize("mtp", [0, 1])
def test_costs_add_up_to_the_models_flops(mtp: int) -> None:
    model = Model(num_layers=7, mtp=Mtp(num_layers=mtp))
    for context in (64, 65_536):
        total = train_flops_per_token(model, context)
        assert sum(layer_costs(model, context, NONE)) == pytest.approx(total, rel=1e-12)
        assert sum(chunk_costs(model, (3, 1, 3), context, NONE)) == pytest.approx(total, rel=1e-12)


def every_split(layers: int, chunks: int):
    for cuts in combinations(range(1, layers), chunks - 1):
        ends = (0, *cuts, layers)
        yield tuple(b - a for a, b in pairwise(ends))


@pytest.mark.parametrize("context", [64, 8192, 1_048_576])
@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("recompute", [NONE, FULL])
def test_no_other_split_has_a_cheaper_worst_chunk(
    context: int, chunks: int, recompute: RecomputePlan
) -> None:
    for model in (Model(num_layers=9, vocab_size=65_536), Model(num_layers=9, dense_ffn_size=4096)):
        best = cost_split(model, chunks, context, recompute)
        assert sum(best) == 9
        worst = {
            split: max(chunk_costs(model, split, context, recompute)) for split in every_split(9, chunks)
        }
        assert worst[best] == pytest.approx(min(worst.values()), rel=1e-9)


def test_a_large_head_shortens_the_last_chunk_and_a_wide_dense_layer_the_first() -> None:
    assert cost_split(Model(num_layers=8, vocab_size=262_144), 2, 64, NONE)[1] < 4
    assert cost_split(Model(num_layers=8, dense_ffn_size=16_384), 2, 64, NONE)[0] < 4


def test_recomputation_weighs_layers_against_the_head() -> None:
    model = Model(num_layers=4, mtp=Mtp(num_layers=1))
    assert layer_costs(model, 64, FULL)[0] == pytest.approx(layer_costs(model, 64, NONE)[0] * 4 / 3)
    assert layer_costs(model, 64, FULL)[-1] < layer_costs(model, 64, NONE)[-1] * 4 / 3


def k3_imbalances(mtp: int) -> list[float]:
    """Imbalance of the chosen split at each context of K3; never worse than the even split's."""
    run = compose(["experiment=k3"])
    run.model.mtp.num_layers = mtp
    run.parallel.pipeline_split = None
    found = []
    for stage in run.curriculum.stages.values():
        parallel = resolved_parallel(run, stage)
        assert parallel.pipeline_split is not None
        factors = [
            imbalance(run.model, split, stage.context_tokens, recompute_plan(parallel))
            for split in (parallel.pipeline_split, even_split(93, 24))
        ]
        assert factors[0] <= factors[1]
        found.append(factors[0])
    return found


def test_kimi_k3_comes_to_its_24_units() -> None:
    """23 groups of three KDA layers and one MLA, then the last MLA layer with the head."""
    model = compose(["experiment=k3"]).model
    assert cost_split(model, 24, 8192, FULL) == (4,) * 23 + (1,)
    assert cost_split(model, 24, 8192, NONE) == (4,) * 23 + (1,)


def test_each_kind_of_sublayer_is_weighed_by_its_own_recomputation() -> None:
    model = Model(num_layers=4, mla_layers=[3], mtp=Mtp(num_layers=1))
    plain = layer_costs(model, 64, NONE)
    for kind, layers in {"kda": [0, 1, 2], "mla": [3], "dense": [0], "moe": [1, 2, 3]}.items():
        full, selective = (
            layer_costs(model, 64, RecomputePlan(**{kind: each}))
            for each in (Recompute.full, Recompute.selective)
        )
        assert [layer for layer in range(4) if full[layer] > plain[layer]] == layers
        assert all(a <= b < c or b == c == a for a, b, c in zip(plain, selective, full, strict=True))


def test_kimi_k3_is_balanced_at_every_context() -> None:
    assert max(k3_imbalances(mtp=0)) < 1.15


def test_mtp_brings_a_second_mla_layer_into_the_last_chunk() -> None:
    short, *_, long = k3_imbalances(mtp=1)
    assert short < 1.05
    assert 1.5 < long < 2.0


def test_a_given_split_and_a_layout_without_a_pipeline_stay_as_they_are() -> None:
    run = compose(["experiment=k3"])
    stage = run.curriculum.stages["s8k"]
    assert resolved_parallel(run, stage).pipeline_split == run.parallel.pipeline_split
    run.parallel = replace(run.parallel, pp=1, vp=1, pipeline_split=None)
    assert resolved_parallel(run, stage).pipeline_split is None
