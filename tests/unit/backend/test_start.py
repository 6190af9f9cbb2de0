"""The CPU bridge and real gloo ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from k3train.backend import cpu_bridge, mcore_fixes
from tests.ranks import run_ranks


def _collectives(rank: int) -> tuple[float, list[int]]:
    mean = torch.full((2,), float(rank), device="cuda")
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    pieces = [torch.zeros(index + 1, dtype=torch.int64) for index in range(dist.get_world_size())]
    dist.all_gather(pieces, torch.full((rank + 1,), rank))
    return mean[0].item(), torch.cat(pieces).tolist()


def test_ranks_average_and_gather_unequal_sizes() -> None:
    assert run_ranks(3, _collectives) == [(1.0, [0, 1, 1, 2, 2, 2])] * 3


def _fail_on_rank_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("the reason")
    dist.barrier()


def test_a_failing_rank_ends_all_with_its_traceback() -> None:
    with pytest.raises(AssertionError, match="the reason"):
        run_ranks(2, _fail_on_rank_one)


def test_hanging_ranks_are_killed() -> None:
    with pytest.raises(AssertionError, match="still ran after"):
        run_ranks(2, lambda rank: dist.barrier() if rank else __import__("time").sleep(30), timeout=2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the bridge is inert with a GPU")
def test_bridge_redirects() -> None:
    assert cpu_bridge.is_installed()
    assert torch.ones(1, device="cuda").device.type == "cpu"
    assert torch.ones(1).to("cuda:0").cuda().type() == "torch.cuda.FloatTensor"


def test_fixes_refuse_another_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcore_fixes, "_applied", False)
    monkeypatch.setattr(mcore_fixes, "version", lambda name: "0.20.0")
    with pytest.raises(RuntimeError, match=r"0\.20\.0 is installed, k3train needs 0\.19\.2"):
        mcore_fixes.apply()
