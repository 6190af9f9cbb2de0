"""End of an optimizer step: new selection biases for every router, and how balanced its experts were."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from k3train.router.router import K3Router


@torch.no_grad()
def update_biases(
    chunks: Iterable[nn.Module], group: Any = None, discard: bool = False
) -> dict[int, dict[str, float]]:
    """Set each router's bias from the whole step's tokens and start the next step's count.

    ``group`` holds the ranks that saw different tokens at the same layers (tp x cp x dp); every rank of it
    must call this, for one all-reduce of all local layers; None when this rank saw them all. With
    ``discard``, for a step that the optimizer skipped, biases stay, nothing is sent and the result is empty;
    ranks must agree on it.

    Returns numbers of the step's valid tokens by the routers' layer number: ``tokens``; ``max_violation``,
    the largest load over the mean load less 1; ``load_cv``, standard deviation over mean of the loads;
    ``dead_experts``, those without a token; ``bias_range``, largest less smallest new bias.
    """
    routers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, K3Router)]
    if discard:
        for router in routers:
            router.reset()
    if discard or not routers:
        return {}
    sums = torch.stack([_collected(router) for router in routers])  # [layers, experts, 1 + statistics]
    if group is not None and group.size() > 1:
        dist.all_reduce(sums, group=group)
    for router, collected in zip(routers, sums.unbind(), strict=True):
        router.set_bias(router.rule.next_bias(router.bias, router.bounds, collected[:, 1:]))
        router.reset()
    return _metrics(routers, sums[:, :, 0])


def _collected(router: K3Router) -> Tensor:
    return torch.cat((router.loads.unsqueeze(-1), router.rule.statistics().to(router.loads.device)), dim=-1)


def _metrics(routers: list[K3Router], loads: Tensor) -> dict[int, dict[str, float]]:
    """``loads``: int64 [layers, experts], summed over ranks."""
    exact = loads.double()
    mean = exact.mean(-1)
    # A step of padding alone has no balance to speak of: 0, not a division by 0.
    over_mean = torch.where(mean > 0, 1 / mean, 0)
    biases = torch.stack([router.bias for router in routers]).double()
    columns = {
        "tokens": exact.sum(-1),
        "max_violation": (exact.amax(-1) - mean) * over_mean,
        "load_cv": exact.std(-1, correction=0) * over_mean,
        "dead_experts": (loads == 0).sum(-1).double(),
        "bias_range": biases.amax(-1) - biases.amin(-1),
    }
    table = torch.stack(tuple(columns.values()), dim=-1).tolist()  # the only wait for the device
    metrics = {
        r.layer_number: dict(zip(columns, row, strict=True)) for r, row in zip(routers, table, strict=True)
    }
    for router in routers:
        metrics[router.layer_number]["tokens"] /= router.top_k
    return metrics
