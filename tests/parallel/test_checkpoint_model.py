"""The whole K3 model through a checkpoint, between layouts, with real gradients and with drawn ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from k3train.checkpoint.load import load_checkpoint
from k3train.checkpoint.save import Save, save_checkpoint
from k3train.config.schema import Optim, Optimizer, Precision
from k3train.model.payload import schedule_config
from k3train.optim.build import allocate_state, build_optimizer
from k3train.optim.decay import is_decayed
from k3train.optim.slices import master_slices
from tests import model_step
from tests.model_step import make_micro
from tests.parallel.toy import assemble, everything, train_toy
from tests.parity.test_model import MODEL, randomise
from tests.ranks import run_ranks

FP32, BF16 = Precision.fp32, Precision.bf16
FOUR = (4, {"tp": 2, "pp": 2, "vp": 2})
ONE = (1, {})
TABLE = [
    pytest.param(FP32, (2, {"tp": 2}), ONE, id="tp2-to-1"),
    pytest.param(FP32, (2, {"pp": 2, "vp": 2}), ONE, id="pp2-vp2-to-1"),
    pytest.param(FP32, (4, {"ep": 4}), ONE, id="ep4-to-1"),
    pytest.param(FP32, (2, {"cp": 2}), (2, {}), id="cp2-to-dp2"),
    pytest.param(FP32, FOUR, (2, {"cp": 2, "ep": 2}), id="tp2-pp2-vp2-to-cp2-ep2"),
    pytest.param(FP32, FOUR, (8, {"tp": 2, "cp": 2, "ep": 4}), id="tp2-pp2-vp2-to-tp2-cp2-ep4-dp2"),
    pytest.param(FP32, (2, {"pp": 2}), (2, {"tp": 2, "etp": 2}), id="pp2-to-tp2-etp2"),
    pytest.param(BF16, FOUR, ONE, id="tp2-pp2-vp2-to-1-bf16", marks=pytest.mark.slow),
    pytest.param(BF16, ONE, (2, {"cp": 2, "ep": 2}), id="1-to-cp2-ep2-bf16"),
]
MICROS = [make_micro((0, 1, 17, 36, 40), MODEL.vocab_size, seed) for seed in range(4)]

OPTIM = Optim(optimizer=Optimizer.muon)
"""Some parameters have AdamW's two moments, others one momentum."""


def build(degrees: dict[str, int], precision: Precision) -> Any:
    chunks, groups = model_step.build(replace(MODEL, precision=precision), degrees, randomise)
    shared = schedule_config(chunks[0].config, groups.layout)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    wrapped = [
        DistributedDataParallel(shared, ddp, chunk, disable_bucketing=i > 0, pg_collection=groups.pg)
        for i, chunk in enumerate(chunks)
    ]
    optimizer = build_optimizer(OPTIM, wrapped, groups)
    allocate_state(optimizer)
    return wrapped, optimizer, groups


def next_loss(chunks: Any, groups: Any) -> float:
    """This rank's part of the loss of one more step, summed over tokens."""
    return model_step.run_schedule(chunks, MICROS, groups)


def save(rank: int, degrees: dict[str, int], precision: Precision, folder: Path) -> Any:
    toy = build(degrees, precision)
    train_toy(*toy, steps=2)
    chunks, optimizer, groups = toy
    saved = everything(*toy)
    save_checkpoint(
        Save(
            directory=folder,
            chunks=chunks,
            optimizer=optimizer,
            train_state={"step": 2},
            groups=groups,
            keep=2,
        )
    )
    return saved, next_loss(chunks, groups), train_toy(*toy, steps=1, start=2)


def load(rank: int, degrees: dict[str, int], precision: Precision, path: Path) -> Any:
    toy = build(degrees, precision)
    chunks, optimizer, groups = toy
    load_checkpoint(path, chunks=chunks, optimizer=optimizer, groups=groups)
    return everything(*toy), next_loss(chunks, groups), train_toy(*toy, steps=1, start=2)


@pytest.fixture(scope="module")
def saved_by(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(folder, what every rank saved) of a layout and a precision; each is saved once."""
    made: dict[str, Any] = {}

    def get(layout: tuple[int, dict[str, int]], precision: Precision) -> Any:
        key = f"{layout} {precision}"
        if key not in made:
            folder = tmp_path_factory.mktemp("saved")
            world, degrees = layout
            made[key] = folder, run_ranks(world, save, degrees, precision, folder)
        return made[key]

    return get


@pytest.mark.parametrize(("precision", "layout", "new_layout"), TABLE)
def test_the_model_crosses_layouts_bitwise(
    saved_by: Any,
    precision: Precision,
    layout: tuple[int, dict[str, int]],
    new_layout: tuple[int, dict[str, int]],
) -> None:
    folder, saved = saved_by(layout, precision)
    world, degrees = new_layout
    loaded = run_ranks(world, load, degrees, precision, folder / "step_00000002")
    before, after = (assemble([each[0] for each in run]) for run in (saved, loaded))
    assert before.keys() == after.keys()
    assert [key for key in before if not torch.equal(before[key], after[key])] == []
    moments = {key for key in after if "exp_avg" in key or "momentum" in key}
    assert {key.split(".")[2] for key in moments} == {"exp_avg", "exp_avg_sq", "momentum"}
    assert all(after[key].any() for key in moments)
    # Activations in bf16 round by 2^-8; parameters above are equal bit for bit in both.
    loss = sum(each[1] for each in saved)
    tolerance = 1e-6 if precision is FP32 else 4e-3
    assert sum(each[1] for each in loaded) == pytest.approx(loss, rel=tolerance)
    assert loaded[0][2] == pytest.approx(saved[0][2], rel=1e-6)


def parameter_table(rank: int) -> dict[str, tuple[bool, float]]:
    chunks, optimizer, _ = build({}, Precision.bf16)
    decay: dict[Any, float] = {}
    for member in optimizer.chained_optimizers:
        for group in member.optimizer.param_groups:
            decay.update({id(own): group["weight_decay"] for own in group["params"]})
        decay.update({param: decay[id(own)] for param, own in master_slices(member).items()})
    return {name: (is_decayed(name, p), decay[p]) for name, p in chunks[0].module.named_parameters()}


EXEMPT = ("norm", "A_log", "dt_bias", "q_conv", "k_conv", "v_conv", "query", "norm_weight", "norm.weight")


def test_weight_decay_of_every_parameter_of_the_model() -> None:
    table = run_ranks(1, parameter_table)[0]
    expected = {name: not name.endswith(EXEMPT) for name in table}
    assert {name: found for name, (found, _) in table.items()} == expected
    assert {name: decay for name, (_, decay) in table.items()} == {
        name: 0.1 if decays else 0.0 for name, decays in expected.items()
    }
    assert {"embedding.weight", "layers.1.ffn.router.weight", "layers.1.ffn.experts.down"} <= {
        name for name, decays in expected.items() if decays
    }
