"""Collectives that the CPU bridge completes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks

BF16, FP32 = torch.bfloat16, torch.float32


def gather(rank: int, dtypes: list[torch.dtype]) -> list[torch.Tensor]:
    parts = [torch.full((3,), rank + 10.0 * i, dtype=dtype) for i, dtype in enumerate(dtypes)]
    whole = [torch.zeros(6, dtype=dtype) for dtype in dtypes]
    with dist._coalescing_manager(async_ops=True) as work:
        for out, part in zip(whole, parts, strict=True):
            dist.all_gather_into_tensor(out, part, async_op=True)
    work.wait()
    return whole


@pytest.mark.parametrize("dtypes", [[BF16, FP32, BF16], [FP32, BF16], [BF16]], ids=str)
def test_a_coalesced_gather_keeps_every_dtype(dtypes: list[torch.dtype]) -> None:
    for whole in run_ranks(2, gather, dtypes):
        for i, (tensor, dtype) in enumerate(zip(whole, dtypes, strict=True)):
            assert tensor.dtype is dtype
            assert tensor.tolist() == [10.0 * i] * 3 + [10.0 * i + 1] * 3
