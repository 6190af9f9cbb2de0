"""Muon for matrices beside AdamW for the rest, over the slices of the distributed optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from k3train.config import schema
from k3train.optim.adam import set_factor
from k3train.optim.exchange import Exchange, Matrix, Piece
from k3train.optim.newton_schulz import orthogonalise
from k3train.optim.qk_clip import QkClip
from k3train.optim.rules import Assignment, Rule
from k3train.optim.slices import Slice
from k3train.parallel.groups import Groups

MARK = "update_rule"
"""Key of a parameter group that says ``muon`` for Muon's."""
_BATCH_ELEMENTS = 2**26
"""Matrices of one shape are orthogonalised together up to this many elements."""


class MuonAdamW:
    """The inner optimizer of a megatron-core DistributedOptimizer: AdamW, Muon, then QK-Clip if any.

    For each matrix W [n, m] with gradient G: B <- momentum * B + G, then
    W <- W (1 - rate * decay) - rate * scale * sqrt(max(n, m)) * orth(G + momentum * B), or orth(B) without
    Nesterov (docs/optim.md). B lies in the same slices as master weights and AdamW's moments, as
    ``momentum``. ``adam`` is any AdamW.
    """

    factor: float = 1.0
    """What gradients are multiplied by as a step reads them."""

    def __init__(
        self,
        adam: Any,
        settings: schema.Muon,
        slices: Sequence[Slice],
        matrices: Sequence[Tensor],
        rules: dict[str, Assignment],
        groups: Groups,
        *,
        clip: QkClip | None,
    ) -> None:
        """``slices`` are all that this rank holds; ``matrices`` the parameters of its model that Muon
        updates, held here or not. Every rank of tp x cp x dp must call this."""
        self.adam, self.settings, self.clip = adam, settings, clip
        self.matrices = set(matrices)
        self.places: dict[Tensor, int] = {}
        """Masters that Muon updates, and where each begins in the flat buffer of updates."""
        pieces: list[tuple[Matrix, Piece]] = []
        self.elements = 0
        for each in slices:
            if each.param in self.matrices:
                pieces += pieces_of(each, rules[each.name], self.elements, groups)
                self.places[each.master] = self.elements
                self.elements += each.master.numel()
        self.device = matrices[0].device if matrices else torch.device("cpu")
        self.exchange = Exchange(pieces, groups.tokens)
        self.dtype = _dtype(settings.precision, self.device)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """AdamW's groups, Muon's among them."""
        return self.adam.param_groups

    @property
    def state(self) -> Any:
        """Moments by master weight."""
        return self.adam.state

    def allocate(self) -> None:
        """Make the moments of every slice, as zeros, where they do not exist yet."""
        for group in self.param_groups:
            for master in group["params"]:
                for key in ("momentum",) if group.get(MARK) == "muon" else ("exp_avg", "exp_avg_sq"):
                    if key not in self.state[master]:
                        self.state[master][key] = torch.zeros_like(master)

    @torch.no_grad()
    def step(self) -> None:
        """Update every slice of master weights. Every rank of tp x cp x dp must call this."""
        ours = [group for group in self.param_groups if group.get(MARK) == "muon"]
        held = [(group["params"], group.get("step", 0)) for group in ours]
        for group in ours:
            group["params"] = []  # AdamW passes over them, and some count a step all the same
        set_factor(self.adam, self.factor)
        self.adam.step()
        for group, (masters, steps) in zip(ours, held, strict=True):
            group["params"] = masters
            group["step"] = steps + 1
        updates = torch.empty(self.elements, dtype=self.dtype, device=self.device)
        for master, place in self.places.items():
            updates[place : place + master.numel()] = self._direction(master)
        self.exchange.apply(updates, self._orthogonalise)
        for group in ours:
            for master in group["params"]:
                place = self.places[master]
                master.mul_(1.0 - group["lr"] * group["weight_decay"])
                master.add_(updates[place : place + master.numel()].to(master.dtype), alpha=-group["lr"])
        if self.clip is not None:
            self.clip.apply()

    def _direction(self, master: Tensor) -> Tensor:
        state, gradient = self.state[master], master.grad
        assert gradient is not None
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(master)
        momentum = state["momentum"].mul_(self.settings.momentum).add_(gradient, alpha=self.factor)
        if self.settings.nesterov:
            return momentum.mul(self.settings.momentum).add_(gradient, alpha=self.factor)
        return momentum

    def _orthogonalise(self, matrices: list[Tensor]) -> list[Tensor]:
        """Whole matrices -> their scaled updates; those of one shape together."""
        results: list[Tensor] = [torch.empty(0)] * len(matrices)
        for (rows, columns), members in _by_shape(matrices).items():
            scale = self.settings.update_scale * max(rows, columns) ** 0.5
            step = max(1, _BATCH_ELEMENTS // (rows * columns))
            for first in range(0, len(members), step):
                some = members[first : first + step]
                updates = orthogonalise(
                    torch.stack([matrices[i] for i in some]),
                    self.settings.newton_schulz,
                    self.settings.newton_schulz_steps,
                    self.dtype,
                )
                for i, update in zip(some, updates.mul(scale), strict=True):
                    results[i] = update
        return results


def pieces_of(
    each: Slice, assigned: Assignment, place: int, groups: Groups
) -> Iterator[tuple[Matrix, Piece]]:
    """Which parts of which matrices a slice of master weights holds.

    ``place`` is where the slice begins in this rank's flat buffer of updates.
    """
    rank = groups.tokens.rank()
    for matrix, shard, first, copy in _matrices(each, assigned, groups):
        start = max(each.start, first)
        stop = min(each.stop, first + matrix.elements // matrix.shards)
        if start < stop:
            at = place + start - each.start
            yield matrix, Piece(shard, start - first, stop - first, rank, at, copy)


def _matrices(each: Slice, assigned: Assignment, groups: Groups) -> Iterator[tuple[Matrix, int, int, bool]]:
    """Matrices of this rank's shard of a parameter: matrix, which shard of it, its first element, copy."""
    shape = each.param.shape
    match assigned.rule:
        case Rule.heads:
            # Each tensor-parallel rank holds whole heads.
            per_head, columns = sum(assigned.blocks), shape[1]
            heads = shape[0] // per_head
            index = groups.tp_rank * heads * len(assigned.blocks)
            row = 0
            for _ in range(heads):
                for rows in assigned.blocks:
                    yield Matrix(each.name, index, rows, columns), 0, row * columns, False
                    index, row = index + 1, row + rows
        case Rule.experts:
            tp = groups.pg.expt_tp
            dim = each.param.partition_dim - 1  # pyright: ignore[reportAttributeAccessIssue]
            sizes = [shape[1], shape[2]]
            sizes[dim] *= tp.size()
            for expert in range(shape[0]):
                index = groups.ep_rank * shape[0] + expert
                matrix = Matrix(each.name, index, sizes[0], sizes[1], tp.size(), dim)
                yield matrix, tp.rank(), expert * shape[1] * shape[2], False
        case _:
            sharded = getattr(each.param, "tensor_model_parallel", False) and groups.layout.tp > 1
            if not sharded:
                yield Matrix(each.name, 0, shape[0], shape[1]), 0, 0, groups.tp_rank > 0
                return
            dim = each.param.partition_dim  # pyright: ignore[reportAttributeAccessIssue]
            sizes = [shape[0], shape[1]]
            sizes[dim] *= groups.layout.tp
            yield Matrix(each.name, 0, sizes[0], sizes[1], groups.layout.tp, dim), groups.tp_rank, 0, False


def _by_shape(matrices: list[Tensor]) -> dict[tuple[int, int], list[int]]:
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, matrix in enumerate(matrices):
        found[matrix.shape[0], matrix.shape[1]].append(i)
    return found


def _dtype(precision: schema.MuonPrecision, device: torch.device) -> torch.dtype:
    if precision is schema.MuonPrecision.auto:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if precision is schema.MuonPrecision.bf16 else torch.float32
