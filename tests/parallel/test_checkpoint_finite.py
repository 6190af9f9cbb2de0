"""A state with NaN or infinity on one of two real ranks: neither saved nor loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from k3train.checkpoint import save as saving
from k3train.checkpoint.finite import NotFinite
from k3train.config.schema import Parallel, Precision
from k3train.optim.build import members
from k3train.optim.slices import master_slices
from tests.parallel.test_checkpoint_faults import load_message_of, save, train
from tests.parallel.toy import build_toy
from tests.ranks import run_ranks


def save_nan(rank: int, folder: Path, where: str) -> list[str]:
    """What a save and a load say of a state with NaN on one of two ranks."""
    _, optimizer, _ = toy = build_toy(2, Parallel(tp=2), Precision.bf16)
    train(toy, 1)
    with torch.no_grad():
        member = members(optimizer)[0]
        sharded = next(p for p in master_slices(member) if getattr(p, "tensor_model_parallel", False))
        if rank == 1 and where == "parameter":
            sharded.view(-1)[0] = float("nan")
        elif rank == 1:
            member.optimizer.state[master_slices(member)[sharded]][where][0] = float("inf")
    said = []
    try:
        save(toy, folder, 1)
    except NotFinite as error:
        said.append(str(error))
    saving.check_finite = lambda *_: None  # as it was written before states were looked at
    return [*said, load_message_of(toy, save(toy, folder, 1))]


@pytest.mark.parametrize("where", ["parameter", "exp_avg"])
def test_a_state_that_is_not_finite_is_neither_saved_nor_loaded(tmp_path: Path, where: str) -> None:
    for refused, loaded in run_ranks(2, save_nan, tmp_path, where):
        assert "NaN or infinity on rank 1" in refused
        assert "NaN or infinity, and nothing can be trained from it" in loaded
        assert "(rank 1; 1 of 2 ranks failed)" in loaded
