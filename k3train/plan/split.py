"""Which decoder layers go to which pipeline chunk, by what they cost. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from k3train.config.merge import even_split, stage_parallel
from k3train.config.schema import Model, Parallel, Recompute, Run, Stage
from k3train.plan.counts import (
    attention_flops,
    ffn_flops,
    head_flops,
    is_mla,
    mtp_attention_flops,
    mtp_layer_flops,
    up_projection_flops,
)
from k3train.plan.recompute import RecomputePlan, recompute_plan


def resolved_parallel(run: Run, stage: Stage) -> Parallel:
    """What one stage runs with: its own overrides, and a split by cost at its context where none is given."""
    parallel = stage_parallel(run.parallel, stage.parallel)
    chunks = parallel.pp * parallel.vp
    # Degrees that do not fit the model are for the layout's rules to report.
    if parallel.pipeline_split is not None or not 1 < chunks <= run.model.num_layers:
        return parallel
    split = cost_split(run.model, chunks, stage.context_tokens, recompute_plan(parallel))
    return replace(parallel, pipeline_split=list(split))


def cost_split(model: Model, chunks: int, context: int, recompute: RecomputePlan) -> tuple[int, ...]:
    """Decoder layers of each chunk in pipeline order, so that the most expensive chunk costs least.

    Among equals the one with the least sum of squares. Every chunk has at least one layer.
    """
    layers = model.num_layers
    first = chunk_costs(model, even_split(layers, chunks), context, recompute)
    limit = max(first) * (1 + 1e-9)  # no better split has a chunk above it
    sums = [0.0, *accumulate(layer_costs(model, context, recompute))]
    # Of the first n layers: (largest chunk, sum of squares, split), in as many chunks as there were passes.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for chunk in range(chunks):
        found: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for start, (largest, squares, split) in best.items():
            for stop in range(start + 1, layers - (chunks - chunk - 1) + 1):
                cost = sums[stop] - sums[start]
                if cost > limit:
                    break
                candidate = (max(largest, cost), squares + cost * cost, (*split, stop - start))
                if stop not in found or candidate < found[stop]:
                    found[stop] = candidate
        best = found
    return best[layers][2]


def layer_costs(model: Model, context: int, recompute: RecomputePlan) -> list[float]:
    """FLOPs of one token in each decoder layer, forward and backward, in a document of ``context`` tokens.

    The last layer bears the output head and MTP, which lie in its chunk. Looking up an embedding costs none.
    Under full recomputation a sublayer, but not the head, runs forward twice; under selective recomputation
    its up-projections do.
    """
    costs: list[float] = []
    for layer in range(model.num_layers):
        attention, ffn = recompute.of_layer(model, layer)
        again = up_projection_flops(model, is_mla(model, layer))
        costs.append(
            _passes(attention) * attention_flops(model, layer, context)
            + (again if attention is Recompute.selective else 0.0)
            + _passes(ffn) * ffn_flops(model, layer)
        )
    costs[-1] += 3.0 * head_flops(model)
    if model.mtp.num_layers:
        attention = mtp_attention_flops(model, context)
        costs[-1] += _passes(recompute.mla) * attention + 3.0 * head_flops(model)
        costs[-1] += _passes(recompute.moe) * (mtp_layer_flops(model, context) - attention)
        costs[-1] += up_projection_flops(model, True) if recompute.mla is Recompute.selective else 0.0
    return costs


def _passes(recompute: Recompute) -> float:
    return 4.0 if recompute is Recompute.full else 3.0


def chunk_costs(model: Model, split: Sequence[int], context: int, recompute: RecomputePlan) -> list[float]:
    """FLOPs of one token in each chunk of ``split``, as ``layer_costs`` counts them."""
    sums = [0.0, *accumulate(layer_costs(model, context, recompute))]
    ends = [0, *accumulate(split)]
    return [sums[stop] - sums[start] for start, stop in pairwise(ends)]


def imbalance(model: Model, split: Sequence[int], context: int, recompute: RecomputePlan) -> float:
    """Cost of the most expensive chunk over the mean: the factor by which the others wait for it."""
    costs = chunk_costs(model, split, context, recompute)
    return max(costs) * len(costs) / sum(costs)
