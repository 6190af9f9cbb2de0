"""Weights of a new model are independent of each other, on every layout."""

from __future__ import annotations

import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from k3train.config.schema import Mtp, Parallel
from k3train.model.build import build_model
from k3train.model.config import make_config
from k3train.parallel.groups import seed_streams, start_groups
from k3train.parallel.layout import make_layout, rank_coordinates
from tests.parallel.test_groups_at_scale import K3
from tests.ranks import run_ranks
from tests.train.runs import small_model

RUN = 4
"""Numbers in a row: of some 100,000 independent ones in fp32, no two runs of so many are equal."""


def _weights(rank: int, parallel: Parallel, world: int) -> dict[str, Tensor]:
    """This rank's weights by a name over all ranks, but for what another rank holds as well."""
    model = small_model()
    model.num_layers, model.num_dense_layers, model.hidden_size, model.mtp = 6, 1, 64, Mtp(num_layers=1)
    layout = make_layout(model, parallel, world)
    groups = start_groups(layout, seed=1)
    before = torch.get_rng_state()
    chunks = build_model(model, make_config(model, parallel, layout), layout, groups, torch.device("cpu"))
    assert torch.equal(before, torch.get_rng_state()), "a weight was drawn outside the tracker's streams"
    place = rank_coordinates(layout, rank)
    found = {}
    for number, chunk in enumerate(chunks):
        for name, weight in chunk.named_parameters():
            if getattr(weight, "allreduce", True):  # not an expert's
                first = place.dp == place.cp == 0
                first = first and (place.tp == 0 or getattr(weight, "tensor_model_parallel", False))
            else:
                first = place.expert_dp == 0
            if first and not getattr(weight, "shared", False):
                found[f"rank {rank} chunk {number} {name}"] = weight.detach().clone()
    return found


def _runs(weight: Tensor) -> set[tuple[float, ...]]:
    """Every run of unequal numbers in ``weight``, its rows one after another."""
    windows = weight.flatten().unfold(0, RUN, 1) if weight.numel() >= RUN else weight.new_empty(0, RUN)
    return {tuple(window) for window in windows.tolist() if len(set(window)) == RUN}


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (1, Parallel()),
        (4, Parallel(pp=2, ep=2)),
        (4, Parallel(tp=2, pp=2)),
        (4, Parallel(tp=2, ep=2, etp=2)),
        (2, Parallel(pp=2, vp=2, pipeline_split=[2, 2, 1, 1])),
    ],
    ids=["one", "pp2-ep2", "tp2-pp2", "tp2-ep2-etp2", "pp2-vp2"],
)
def test_no_two_weights_share_random_numbers(world: int, parallel: Parallel) -> None:
    owner: dict[tuple[float, ...], str] = {}
    drawn = 0
    for weights in run_ranks(world, _weights, parallel, world):
        for name, weight in weights.items():
            runs = _runs(weight)
            drawn += bool(runs)
            shared = {owner[run] for run in runs if run in owner}
            assert not shared, (name, shared)
            owner.update(dict.fromkeys(runs, name))
    assert drawn > 6 * 10


def _streams(_: int, parallel: Parallel, world: int) -> dict[tuple, bytes]:
    layout = make_layout(K3, parallel, world)
    streams: dict[tuple, bytes] = {}
    for rank in range(world):
        place = rank_coordinates(layout, rank)
        seed_streams(layout, 1, tp_rank=place.tp, pp_rank=place.pp, ep_rank=place.ep, etp_rank=place.etp)
        tracker = get_cuda_rng_tracker()
        assert tracker is not None
        for name, state in tracker.get_states().items():
            own = {"model-parallel-rng": (place.tp,), "expert-parallel-rng": (place.ep, place.etp)}
            key = (name, place.pp, *own.get(name, ()))
            state = state.numpy().tobytes()
            assert streams.setdefault(key, state) == state, key
    return streams


@pytest.mark.parametrize(
    ("world", "parallel"),
    [(512, Parallel(tp=8, pp=4, ep=64)), (512, Parallel(tp=8, pp=4, ep=32, etp=4)), (224, Parallel(ep=224))],
    ids=str,
)
def test_no_two_streams_of_a_layout_have_one_seed(world: int, parallel: Parallel) -> None:
    streams = run_ranks(1, _streams, parallel, world)[0]
    tp, pp, experts = parallel.tp, parallel.pp, parallel.ep * parallel.etp
    assert len(streams) == pp * (1 + tp + experts)
    assert len(set(streams.values())) == len(streams)
