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
    ended: bool = False
    """Whether the step was finished or discarded."""

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

        Every rank of the group must call this, once. Returns the numbers of ``balance_table`` by the routers'
        layer number, and for routers with an audit its report.
        """
        if self.sums is None:
            return {}
        self._end()
        self._wait()
        loads, statistics = self.sums[:, :, 0], self.sums[:, :, 1:]
        rules = [router.rule for router in self.routers]
        old = torch.stack([router.bias for router in self.routers])
        bounds = torch.stack([router.bounds for router in self.routers])
        new, saturated = rules[0].next_biases(rules, old, bounds, loads, statistics, self.group)
        _use(self.routers, new)
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
        self._end()
        self._wait()
        for router in self.routers:
            router.reset()

    def count_again(self) -> None:
        """Forget the step because it is about to be computed once more; audits begin again."""
        audited = [router for router in self.routers if router.audit is not None]
        self.discard()
        for router in audited:
            router.audit = Audit(router.top_k)

    def _end(self) -> None:
        if self.ended and self.routers:
            raise RuntimeError(
                "this step's router update was finished or discarded before: call start_update again after "
                "the next step's last backward pass"
            )
        self.ended = True

    def _wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None


@torch.no_grad()
def start_update(chunks: Iterable[nn.Module] | nn.Module, group: Any = None) -> RouterUpdate:
    """Begin to sum what every router saw since its last update; call it after the step's last backward pass.

    ``chunks`` are the model chunks of this rank; a single one may come without a list.
    ``group`` holds the ranks that saw different tokens at the same layers (tp x cp x dp); every rank of it
    must call this, for one all-reduce of all local layers, which runs beside what follows until ``finish``;
    None when this process is the only one. What is routed between here and ``finish`` is not counted. Raises
    ValueError for no group among several processes, for routers of different settings, and for a router that
    its DistributedDataParallel does not know.
    """
    routers = _routers(chunks)
    if not routers:
        return RouterUpdate([], None, None, group)
    if group is None and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"group is missing and there are {dist.get_world_size()} ranks, whose biases would drift apart: "
            "pass the ranks that saw different tokens, pg_collection.tp_dp_cp"
        )
    _check_alike(routers)
    sums = torch.stack([_collected(router) for router in routers])
    shared = group is not None and group.size() > 1
    work = dist.all_reduce(sums, group=group, async_op=True) if shared else None
    return RouterUpdate(routers, sums, work, group)


@torch.no_grad()
def set_biases(routers: list[K3Router], biases: Tensor) -> None:
    """Let routers of the same settings use ``biases`` [routers, experts] in the coming forward passes.

    Raises ValueError for another shape, and for biases that are not finite.
    """
    wanted = len(routers), routers[0].num_experts
    if tuple(biases.shape) != wanted:
        raise ValueError(
            f"biases have shape {tuple(biases.shape)}: these routers need [routers, experts] = {wanted}"
        )
    if not biases.isfinite().all():
        raise ValueError("biases hold numbers that are not finite, under which no router could choose")
    _use(routers, biases)


def _use(routers: list[K3Router], biases: Tensor) -> None:
    torch._foreach_copy_([router.bias for router in routers], biases.unbind())
    bounds = routers[0].rule.bounds(torch.stack([router.bias for router in routers]))
    torch._foreach_copy_([router.bounds for router in routers], bounds.unbind())


def look_closer(chunks: Iterable[nn.Module] | nn.Module) -> None:
    """Audit every router's next step; call it before the step's first forward pass."""
    for router in _routers(chunks):
        router.audit = Audit(router.top_k)


def update_biases(
    chunks: Iterable[nn.Module] | nn.Module, group: Any = None, discard: bool = False
) -> dict[int, dict[str, float]]:
    """``start_update`` and ``finish`` at once; with ``discard`` nothing is sent, biases stay, and the result
    is empty. Called again without new tokens it changes nothing."""
    if discard:
        RouterUpdate(_routers(chunks), None, None, group).discard()
        return {}
    return start_update(chunks, group).finish()


def _routers(chunks: Iterable[nn.Module] | nn.Module) -> list[K3Router]:
    """The routers of all chunks, each of which its chunk trains."""
    found: list[K3Router] = []
    chunks = [chunks] if isinstance(chunks, nn.Module) else chunks
    for chunk in chunks:
        own = [module for module in chunk.modules() if isinstance(module, K3Router)]
        trained = getattr(chunk, "param_to_bucket_group", None)  # megatron-core's DistributedDataParallel
        for router in own:
            if trained is not None and router.weight.requires_grad and router.weight not in trained:
                raise ValueError(
                    f"the router of layer {router.layer_number} came into the model after "
                    "DistributedDataParallel, which does not reduce its weight's gradient: build routers "
                    "with the model, before it and the optimizer"
                )
        found += own
    return found


def _check_alike(routers: list[K3Router]) -> None:
    """All layers are solved at once, with the settings of the first."""
    first = routers[0]
    for other in routers[1:]:
        for name in ("num_experts", "top_k", "settings"):
            if getattr(first, name) != getattr(other, name):
                raise ValueError(
                    f"the routers of layers {first.layer_number} and {other.layer_number} differ in {name}: "
                    "give all routers of one update the same"
                )


def _collected(router: K3Router) -> Tensor:
    return torch.cat((router.loads.unsqueeze(-1), router.rule.statistics().to(router.loads.device)), dim=-1)
