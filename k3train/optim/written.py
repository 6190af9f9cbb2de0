"""What a rank writes of a checkpoint, which is on the host by then. No torch."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from k3train.parallel.layout import Layout


def most_written(dense: Iterable[int], experts: Iterable[int], layout: Layout) -> int:
    """Bytes on the rank of a pipeline rank that writes most, of tensors with these bytes each.

    Of the ranks that hold the same tensor, megatron-core has the one write it that writes least so far: first
    tensors that fewer ranks hold, which are those of ``experts``, then the largest.
    """
    ranks = layout.dp * layout.cp
    # The rest of expert_dp are ranks of other tensor parallelism, which write other tensors.
    holders = min(layout.expert_dp, ranks)
    if holders == ranks:
        return max(_shared([*dense, *experts], [0] * ranks))
    return max(_shared(dense, _shared(experts, [0] * holders) * (ranks // holders)))


def _shared(sizes: Iterable[int], loads: list[int]) -> list[int]:
    """``loads`` with each size added to the smallest."""
    heapq.heapify(loads)
    for size in sorted(sizes, reverse=True):
        heapq.heapreplace(loads, loads[0] + size)
    return loads
