"""The optimizer on the host over real ranks: layouts, checkpoints either way, and going on bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from k3train.checkpoint.load import load_checkpoint
from k3train.checkpoint.save import Save, save_checkpoint
from k3train.config.schema import Offload, Optim, Parallel, Precision
from k3train.optim.build import members
from k3train.optim.offload import HostAdam, host_adam
from tests.parallel.test_optimizer import three_steps
from tests.parallel.toy import assemble, build_toy, everything, train_toy
from tests.ranks import run_ranks
from tests.with_deepspeed import with_deepspeed

pytestmark = with_deepspeed


@pytest.fixture(autouse=True)
def _loaded() -> None:
    """DeepSpeed is imported once, and ranks are forked with it."""
    host_adam()


@pytest.mark.parametrize("precision", list(Precision))
def test_ranks_with_offload_take_the_steps_of_one_without(precision: Precision) -> None:
    """Norm, clipping, decay groups and ZeRO-1 slices of dense and expert parameters."""
    one = run_ranks(1, three_steps, 1, Parallel(), precision, Optim())
    parallel = Parallel(tp=2, ep=2)
    many = run_ranks(4, three_steps, 4, parallel, precision, Optim(offload=Offload.cpu))
    assert all(each["norms"] == pytest.approx(one[0]["norms"], rel=1e-6) for each in many)
    assert all(norm > 1 for norm in one[0]["norms"]), "clipped"
    expected, found = (assemble([each["parts"] for each in run]) for run in (one, many))
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        if value.dtype is torch.float32:
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def save_and_go_on(rank: int, offload: Offload, folder: Path) -> Any:
    toy = build_toy(2, Parallel(ep=2), Precision.bf16, Optim(offload=offload))
    chunks, optimizer, groups = toy
    assert all(isinstance(m.optimizer, HostAdam) == (offload is Offload.cpu) for m in members(optimizer))
    train_toy(*toy, steps=3)
    saved = everything(*toy)
    save_checkpoint(
        Save(
            directory=folder,
            chunks=chunks,
            optimizer=optimizer,
            train_state={"step": 3},
            groups=groups,
            keep=2,
        )
    )
    return saved, train_toy(*toy, steps=3, start=3), everything(*toy)


def load_and_go_on(rank: int, offload: Offload, path: Path) -> Any:
    toy = build_toy(2, Parallel(ep=2), Precision.bf16, Optim(offload=offload))
    chunks, optimizer, groups = toy
    load_checkpoint(path, chunks=chunks, optimizer=optimizer, groups=groups)
    return everything(*toy), train_toy(*toy, steps=3, start=3), everything(*toy)


def test_checkpoints_cross_over_and_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    for saver in Offload:
        folder = tmp_path / saver.value
        saved = run_ranks(2, save_and_go_on, saver, folder)
        before, end = (assemble([each[i] for each in saved]) for i in (0, 2))
        for loader in Offload:
            loaded = run_ranks(2, load_and_go_on, loader, folder / "step_00000003")
            after, again = (assemble([each[i] for each in loaded]) for i in (0, 2))
            assert after.keys() == before.keys()
            assert [key for key in before if not torch.equal(before[key], after[key])] == []
            assert all(after[key].any() for key in after if "exp_avg" in key)
            assert loaded[0][1] == pytest.approx(saved[0][1], rel=1e-6)
            if loader is saver:
                assert [key for key in end if not torch.equal(end[key], again[key])] == []
