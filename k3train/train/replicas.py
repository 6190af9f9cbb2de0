"""Finds state that changed where nothing may change it: at rest between two steps, and between replicas."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from k3train.train.digest import digests
from k3train.train.setup import StageSetup, moments, weights


@dataclass(frozen=True, slots=True)
class Damage:
    """State that does not have the bits it should have; the same on every rank."""

    ranks: list[int]
    """Who holds it; every holder where no majority tells which one is wrong."""
    tensors: list[str]

    def __str__(self) -> str:
        who = f"{'rank' if len(self.ranks) == 1 else 'one of ranks'} {' and '.join(map(str, self.ranks))}"
        more = f" and {len(self.tensors) - 3} more" if len(self.tensors) > 3 else ""
        return f"{who}: {', '.join(self.tensors[:3])}{more}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """Digests of everything on this rank that the next step starts from."""

    names: list[str]
    values: list[int]
    """One for each name."""
    axes: list[tuple[str, ...]]
    """Groups over which each is replicated; none for what only this rank has (ZeRO-1 slices)."""


def fingerprint(setup: StageSetup) -> Fingerprint:
    """Digests of this rank's parameters, router biases, master weights and moments."""
    names: list[str] = []
    tensors: list[torch.Tensor] = []
    axes: list[tuple[str, ...]] = []
    for name, parameter in weights(setup.chunks):
        expert = not getattr(parameter, "allreduce", True)
        sharded = expert or getattr(parameter, "tensor_model_parallel", False)
        names.append(name)
        tensors.append(parameter)
        axes.append(("expt_dp",) if expert else ("dp_cp",) if sharded else ("dp_cp", "tp"))
    for chunk in setup.chunks:
        kept = chunk.module.state_dict(keep_vars=True)
        for name, buffer in chunk.module.named_buffers():
            if name in kept:
                names.append(name)
                tensors.append(buffer)
                axes.append(("tokens",))
    for number, (name, tensor) in enumerate(moments(setup.optimizer)):
        names.append(f"{name} {number}")
        tensors.append(tensor)
        axes.append(())
    return Fingerprint(names=names, values=digests(tensors), axes=axes)


def odd_replicas(setup: StageSetup, own: Fingerprint) -> Damage | None:
    """Compare with every rank that must hold the same bits. Every rank must call this."""
    found: list[tuple[int, str]] = []
    pg = setup.groups.pg
    replicated = {"dp_cp": pg.dp_cp, "tp": pg.tp, "expt_dp": pg.expt_dp, "tokens": setup.groups.tokens}
    for axis, group in replicated.items():
        mine = [i for i, axes in enumerate(own.axes) if axis in axes]
        if group.size() == 1 or not mine:
            continue
        values = torch.tensor([own.values[i] for i in mine], dtype=torch.int64, device=setup.device)
        low, high = values.clone(), values.clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
        dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
        if torch.equal(low, high):
            continue
        everyone = torch.empty(group.size() * len(mine), dtype=torch.int64, device=setup.device)
        dist.all_gather_into_tensor(everyone, values, group=group)
        columns = everyone.view(group.size(), len(mine)).T.tolist()
        ranks = dist.get_process_group_ranks(group)
        for index, column in zip(mine, columns, strict=True):
            usual, times = Counter(column).most_common(1)[0]
            sure = 2 * times > len(column)
            odd = [rank for rank, value in zip(ranks, column, strict=True) if value != usual or not sure]
            found += [(rank, own.names[index]) for rank in odd]
    return _told_to_all(found)


def changed_at_rest(before: Fingerprint, now: Fingerprint) -> Damage | None:
    """Compare this rank's state with what it was at the end of the step before. Every rank must call this."""
    changed = [
        name for name, old, new in zip(before.names, before.values, now.values, strict=True) if old != new
    ]
    return _told_to_all([(dist.get_rank(), name) for name in changed])


def _told_to_all(found: list[tuple[int, str]]) -> Damage | None:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    every = {entry for rank in gathered for entry in rank}
    if not every:
        return None
    return Damage(sorted({rank for rank, _ in every}), sorted({name for _, name in every}))
