"""End of an optimizer step: new selection biases for every router, and how balanced its experts were."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from k3train.router.audit import Audit
from k3train.router.metrics import COLUMNS, balance_table
from k3train.router.router import K3Router


@dataclass(slots=True)
class RouterUpdate:
    """The step's statistics of all local routers on their way to the sum over ranks."""

    routers: list[K3Router]
    sums: Tensor | None
    """int64 [layers, experts, 1 + statistics]: loads, then what the rule needs."""
    work: Any
    """The collective, or None when this rank saw every token."""
    group: Any

    def snapshot(self) -> dict[str, Tensor]:
        """What the step's biases are about to be found from, on the host; call it before ``finish``.

        layers [L], loads [L, experts], statistics [L, experts, n], and the bias [L, experts] and bounds
        [L, 2] that the step had.
        """
        assert self.sums is not None
        self._wait()
        return {
            "layers": torch.tensor([router.layer_number for router in self.routers]),
            "loads": self.sums[:, :, 0].cpu(),
            "statistics": self.sums[:, :, 1:].cpu(),
            "bias": torch.stack([router.bias for router in self.routers]).cpu(),
            "bounds": torch.stack([router.bounds for router in self.routers]).cpu(),
        }

    @torch.no_grad()
    def finish(self) -> dict[int, dict[str, float]]:
        """Set each router's bias from the whole step's tokens and start the next step's count.

        Every rank of the group must call this. Returns the numbers of ``balance_table`` by the routers' layer
        number, and for routers with an audit its report.
        """
        if self.sums is None:
            return {}
        self._wait()
        loads, statistics = self.sums[:, :, 0], self.sums[:, :, 1:]
        rules = [router.rule for router in self.routers]
        old = torch.stack([router.bias for router in self.routers])
        bounds = torch.stack([router.bounds for router in self.routers])
        new, saturated = rules[0].next_biases(rules, old, bounds, loads, statistics, self.group)
        set_biases(self.routers, new)
        reports = [
            router.audit.report(router.bias, self.group) if router.audit else {} for router in self.routers
        ]
        for router in self.routers:
            router.reset()
        table = balance_table(loads, old, new, saturated, self.routers[0].top_k)
        rows = table.tolist()  # the only wait for the device
        return {
            router.layer_number: {**dict(zip(COLUMNS, row, strict=True)), **report}
            for router, row, report in zip(self.routers, rows, reports, strict=True)
        }

    def discard(self) -> None:
        """Forget a step that the optimizer skipped: biases stay. Ranks must agree on it."""
        self._wait()
        for router in self.routers:
            router.reset()

    def _wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None


@torch.no_grad()
def start_update(chunks: Iterable[nn.Module], group: Any = None) -> RouterUpdate:
    """Begin to sum what every router saw since its last update; call it after the step's last backward pass.

    ``group`` holds the ranks that saw different tokens at the same layers (tp x cp x dp); every rank of it
    must call this, for one all-reduce of all local layers, which runs beside what follows until ``finish``;
    None when this rank saw them all.
    """
    routers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, K3Router)]
    if not routers:
        return RouterUpdate([], None, None, group)
    sums = torch.stack([_collected(router) for router in routers])
    shared = group is not None and group.size() > 1
    work = dist.all_reduce(sums, group=group, async_op=True) if shared else None
    return RouterUpdate(routers, sums, work, group)


@torch.no_grad()
def set_biases(routers: list[K3Router], biases: Tensor) -> None:
    """Let routers of the same settings use ``biases`` [routers, experts] in the coming forward passes."""
    torch._foreach_copy_([router.bias for router in routers], biases.unbind())
    bounds = routers[0].rule.bounds(torch.stack([router.bias for router in routers]))
    torch._foreach_copy_([router.bounds for router in routers], bounds.unbind())


def look_closer(chunks: Iterable[nn.Module]) -> None:
    """Audit every router's next step; call it before the step's first forward pass."""
    for router in (m for chunk in chunks for m in chunk.modules() if isinstance(m, K3Router)):
        router.audit = Audit(router.top_k)


def update_biases(
    chunks: Iterable[nn.Module], group: Any = None, discard: bool = False
) -> dict[int, dict[str, float]]:
    """``start_update`` and ``finish`` at once; with ``discard`` nothing is sent, biases stay, and the result
    is empty."""
    update = start_update(chunks, None if discard else group)
    if discard:
        update.discard()
        return {}
    return update.finish()


def _collected(router: K3Router) -> Tensor:
    return torch.cat((router.loads.unsqueeze(-1), router.rule.statistics().to(router.loads.device)), dim=-1)
