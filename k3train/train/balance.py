"""How evenly tokens reached experts in one step, layer by layer, on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from k3train.monitor.balance_file import Saved, save_step
from k3train.router.metrics import AUDIT_COLUMNS, COLUMNS
from k3train.router.update import look_closer
from k3train.train.progress import is_due
from k3train.train.setup import StageSetup


@dataclass(frozen=True, slots=True)
class Balance:
    """One step's routers."""

    layers: dict[int, dict[str, float]]
    """By layer number, from 1; the MTP layer comes last. Names are those of ``router.metrics``."""

    def worst(self, name: str) -> float:
        """Largest value of any layer."""
        return max(layer.get(name, 0.0) for layer in self.layers.values())

    def total(self, name: str) -> float:
        """Sum over layers."""
        return sum(layer.get(name, 0.0) for layer in self.layers.values())


def look_closer_if_due(setup: StageSetup, step: int) -> None:
    """Audit the routers in ``step`` (from 1 over the run) if the run asks for it."""
    if is_due(step, setup.run.monitor.balance.audit_every_steps):
        look_closer(setup.chunks)


def settle(setup: StageSetup, step: int) -> Balance | None:
    """Set every router's bias after ``step``, save what it came from if that is due, and return every layer's
    numbers. Every rank must call this."""
    routers = setup.routers
    if is_due(step, setup.run.monitor.balance.save_every_steps) and routers.routers:
        snapshot = {name: value.numpy() for name, value in routers.snapshot().items()}
        groups = setup.groups
        if groups.dp_rank == groups.cp_rank == groups.tp_rank == 0:
            saved = Saved(top_k=setup.run.model.moe.top_k, **snapshot)
            save_step(Path(setup.run.dir), step, groups.pp_rank, saved)
    return all_layers(setup, routers.finish())


def all_layers(setup: StageSetup, local: dict[int, dict[str, float]]) -> Balance | None:
    """Every layer's numbers from those of each pipeline rank, which own different layers; all must call this.

    ``local`` is what ``update_biases`` returned. None when the model has no experts.
    """
    model = setup.run.model
    if model.num_dense_layers == model.num_layers and not model.mtp.num_layers:
        return None
    if setup.groups.layout.pp == 1:
        return Balance(local)
    names = [*COLUMNS, *AUDIT_COLUMNS]
    shape = model.num_layers + 1 + model.mtp.num_layers, len(names) + 1
    table = torch.zeros(shape, dtype=torch.float64)
    for number, layer in local.items():
        table[number] = torch.tensor([1.0, *(layer.get(name, float("nan")) for name in names)])
    table = table.to(setup.device)
    dist.all_reduce(table, group=setup.groups.pg.pp)
    rows = table.tolist()
    return Balance(
        {
            number: {name: value for name, value in zip(names, row, strict=True) if value == value}
            for number, (here, *row) in enumerate(rows)
            if here
        }
    )
