"""Checkpoints on real ranks: any layout to any layout, continuation, agreement on failure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from k3train.checkpoint.load import load_checkpoint
from k3train.checkpoint.save import Save, save_checkpoint
from k3train.config.schema import Parallel, Precision
from k3train.optim.build import optimizer_steps
from tests.parallel.toy import assemble, build_toy, everything, train_toy
from tests.ranks import run_ranks

STATE = {"step": 3, "tokens": 300, "stage": "one", "data": {"sequence": 7}}


def with_steps(chunks: Any, optimizer: Any, groups: Any) -> dict[str, Any]:
    return {"parts": everything(chunks, optimizer, groups), "steps": optimizer_steps(optimizer)}


def train_and_save(rank: int, world: int, parallel: Parallel, precision: Precision, folder: Path) -> Any:
    chunks, optimizer, groups = build_toy(world, parallel, precision)
    norms = train_toy(chunks, optimizer, groups, steps=3)
    before = with_steps(chunks, optimizer, groups)
    save_checkpoint(
        Save(directory=folder, chunks=chunks, optimizer=optimizer, train_state=STATE, groups=groups, keep=2)
    )
    after_norms = train_toy(chunks, optimizer, groups, steps=2, start=3)
    return {"saved": before, "norms": norms + after_norms, "end": with_steps(chunks, optimizer, groups)}


def load_and_train(rank: int, world: int, parallel: Parallel, precision: Precision, path: Path) -> Any:
    chunks, optimizer, groups = build_toy(world, parallel, precision)
    train_toy(chunks, optimizer, groups, steps=1, start=9)  # whatever was there before must not show through
    state = load_checkpoint(path, chunks=chunks, optimizer=optimizer, groups=groups)
    loaded = with_steps(chunks, optimizer, groups)
    norms = train_toy(chunks, optimizer, groups, steps=2, start=3)
    return {"state": state, "loaded": loaded, "norms": norms, "end": with_steps(chunks, optimizer, groups)}


def same(results: list[Any], others: list[Any], key: str, other_key: str) -> None:
    one = assemble([each[key]["parts"] for each in results])
    two = assemble([each[other_key]["parts"] for each in others])
    assert one.keys() == two.keys()
    different = [name for name in one if not torch.equal(one[name], two[name])]
    assert not different
    assert {each[key]["steps"] for each in results} == {each[other_key]["steps"] for each in others}


TABLE = [
    pytest.param(2, Parallel(tp=2), 1, Parallel(), id="tp2-to-1"),
    pytest.param(2, Parallel(pp=2), 1, Parallel(), id="pp2-to-1"),
    pytest.param(2, Parallel(ep=2), 1, Parallel(), id="ep2-to-1"),
    pytest.param(1, Parallel(), 2, Parallel(ep=2), id="1-to-ep2"),
    pytest.param(2, Parallel(cp=2), 2, Parallel(), id="cp2-to-dp2"),
    pytest.param(2, Parallel(), 4, Parallel(tp=2, pp=2), id="dp2-to-tp2-pp2"),
    pytest.param(4, Parallel(pp=2, vp=2), 2, Parallel(pp=2), id="dp2-vp2-to-pp2"),
    pytest.param(4, Parallel(pp=2, ep=2), 2, Parallel(tp=2), id="pp2-ep2-to-tp2"),
    pytest.param(2, Parallel(ep=2), 2, Parallel(ep=2), id="ep2-to-ep2"),
]


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize(("world", "parallel", "new_world", "new_parallel"), TABLE)
def test_any_layout_continues_any_other_bitwise(
    tmp_path: Path,
    precision: Precision,
    world: int,
    parallel: Parallel,
    new_world: int,
    new_parallel: Parallel,
) -> None:
    saved = run_ranks(world, train_and_save, world, parallel, precision, tmp_path)
    path = tmp_path / "step_00000003"
    loaded = run_ranks(new_world, load_and_train, new_world, new_parallel, precision, path)
    assert all(each["state"] == STATE for each in loaded)
    same(saved, loaded, "saved", "loaded")
    norm = saved[0]["norms"]
    assert all(each["norms"] == pytest.approx(norm[3:], rel=1e-6) for each in loaded)
    moments = assemble([each["loaded"]["parts"] for each in loaded])
    assert all(value.any() for name, value in moments.items() if "exp_avg" in name)
