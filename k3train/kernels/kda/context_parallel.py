"""Kimi Delta Attention over context-parallel shards: how states pass between ranks (k3 report eq. 17).

Each rank turns its shard into one affine map of the state, S -> written + transition S. Maps are exchanged
once a layer and direction; a scan over the ranks then gives every rank the state that enters its shard.
Documents need no care here: a shard in which one starts has transition zero, and a shard whose first token
starts one ignores what enters.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from k3train.parallel import collectives


class ContextParallelExchange:
    """Implements ``chunked.StateExchange`` over contiguous shards in the rank order of ``group``."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def entering(self, transition: Tensor | None, written: Tensor) -> Tensor:
        """State [l, k, v] that enters this rank's shard; zero on the first.

        ``transition`` [l, k, k] (None: zero) and ``written`` [l, k, v] are this shard's map. Every rank of
        the group must call this.
        """
        return self._scan(transition, written, backward=False)

    def leaving(self, transition: Tensor | None, gradient: Tensor) -> Tensor:
        """Gradient [l, k, v] of the state that leaves this shard; zero on the last rank.

        ``gradient`` is what this shard alone sends to its entering state; ``transition`` as in ``entering``.
        Every rank of the group must call this.
        """
        return self._scan(None if transition is None else transition.mT, gradient, backward=True)

    def _scan(self, matrix: Tensor | None, offset: Tensor, *, backward: bool) -> Tensor:
        lanes, channels, _ = offset.shape
        if matrix is None:
            matrix = offset.new_zeros(lanes, channels, channels)
        maps = torch.cat([matrix, offset], -1)[None]
        ranks = self.group.size()
        # Each rank scans the maps of all ranks for its share of the heads: what a rank receives does not grow
        # with the number of ranks, but for the empty maps that make the shares equal.
        maps = F.pad(maps, (0, 0, 0, 0, 0, -lanes % ranks))
        maps = collectives.all_to_all(maps, self.group, split_dim=1, concat_dim=0)
        states = scan_maps(maps, backward=backward)
        return collectives.all_to_all(states, self.group, split_dim=0, concat_dim=1)[0, :lanes]


def scan_maps(maps: Tensor, *, backward: bool) -> Tensor:
    """States before each map when they are applied in order, from zero: [r, l, k, k + v] -> [r, l, k, v].

    ``backward`` applies them from the last to the first.
    """
    ranks, lanes, channels, width = maps.shape
    states = maps.new_zeros(ranks, lanes, channels, width - channels)
    order = list(range(ranks))
    if backward:
        order.reverse()
    for here, after in pairwise(order):
        matrix, offset = maps[here, :, :, :channels], maps[here, :, :, channels:]
        states[after] = torch.baddbmm(offset, matrix, states[here])
    return states
