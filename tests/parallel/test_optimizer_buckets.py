"""Optimizer state under its parameters' names, however gradients are cut into buckets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)

from k3train.config.schema import Optim
from k3train.model.payload import schedule_config
from k3train.optim.build import allocate_state, build_optimizer
from tests import model_step, sharded
from tests.optimizer_step import optimizer_step
from tests.parallel.test_model_parallel import MICROS
from tests.parallel.toy import optimizer_values
from tests.parity.test_model import MODEL, randomise
from tests.ranks import run_ranks


def _moments(rank: int, degrees: dict[str, Any], bucket_size: int | None, weights):
    """One AdamW step, then this rank's parts of masters and moments as a checkpoint would name them."""
    chunks, groups = model_step.build(MODEL, degrees, randomise)
    if weights is not None:
        sharded.load(chunks, groups, weights)
    held = [(k, s, o, part.clone()) for k, s, o, part in sharded.shards(chunks, groups)]
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=bucket_size is not None,
        bucket_size=bucket_size,
    )
    config = schedule_config(chunks[0].config, groups.layout)
    wrapped = [DistributedDataParallel(config, settings, chunk, pg_collection=groups.pg) for chunk in chunks]
    optimizer = build_optimizer(Optim(), wrapped, groups)
    allocate_state(optimizer)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if bucket_size is not None:
        config.no_sync_func = [chunk.no_sync for chunk in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
    model_step.run_schedule(wrapped, MICROS, groups)
    outcome = optimizer_step(optimizer)
    parts = []
    for state in optimizer_values(wrapped, optimizer, groups).values():
        parts += sharded.parts_of(state)
    buckets = sum(len(buffer.buckets) for chunk in wrapped for buffer in chunk.buffers)
    return held, parts, outcome.grad_norm, buckets


def _run(ranks: int, degrees, bucket_size, weights):
    results = run_ranks(ranks, _moments, degrees, bucket_size, weights)
    return sharded.whole([part for r in results for part in r[1]]), results[0][2], results[0][3], results


@pytest.mark.parametrize(
    ("ranks", "degrees", "bucket_size"),
    [(2, {}, 700), (2, {"pp": 2}, None), (2, {"ep": 2}, 500)],
    ids=str,
)
def test_moments_belong_to_their_parameters(ranks, degrees, bucket_size):
    want, norm, one_bucket, results = _run(1, {}, None, None)
    weights = sharded.whole(results[0][0])
    got, other_norm, buckets, _ = _run(ranks, degrees, bucket_size, weights)
    assert buckets > one_bucket or "pp" in degrees
    assert other_norm == pytest.approx(norm, rel=1e-5)
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        if "exp_avg" in key:
            error = (got[key] - tensor).abs().max()
            assert error <= 2e-5 * tensor.abs().max() + 1e-9, (key, error)
    assert any(torch.count_nonzero(tensor) for tensor in want.values())
