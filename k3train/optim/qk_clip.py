"""QK-Clip: after a step, shrink queries and keys of heads whose attention logits grew too large (Kimi K2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from k3train.model.mla import GatedMla
from k3train.optim.slices import Slice


class QkClip:
    """For each MLA head, gamma = min(1, threshold / largest logit of the step) scales rows of the weights.

    Rows of q_b and kv_b that make the head's own query and key channels are multiplied by sqrt(gamma), rows
    of q_b that meet the shared key by gamma, since that key serves all heads and stays; values stay too. A
    logit is then at most ``threshold`` for the same inputs (arXiv:2507.20534, algorithm 1). From now on
    ``layers``, this rank's, keep their largest logits; ``slices`` are the master weights on this rank.
    """

    def __init__(
        self, threshold: float, layers: Sequence[GatedMla], slices: Sequence[Slice], dp_cp: Any
    ) -> None:
        self.threshold, self.layers, self.group = threshold, layers, dp_cp
        self.slices = {each.param: each for each in slices}
        self.largest = torch.tensor(float("-inf"))
        """fp32, 0-dim: largest logit of the last step over this rank's layers."""
        for layer in layers:
            layer.track_logits()

    @torch.no_grad()
    def apply(self) -> None:
        """Scale the master weights and start the next step's maxima. Every rank of dp x cp must call this.

        One all-reduce of a number per layer and head; under context parallelism each rank has seen the whole
        buffer for its own heads, so the maximum over ranks completes both axes.
        """
        # [layers, heads of this tp rank]
        logits = torch.stack([layer.max_logits for layer in self.layers if layer.max_logits is not None])
        if self.group.size() > 1:
            dist.all_reduce(logits, op=dist.ReduceOp.MAX, group=self.group)
        self.largest = logits.max()
        gammas = torch.where(logits > self.threshold, self.threshold / logits, 1.0)
        for layer, gamma in zip(self.layers, gammas, strict=True):
            for weight, factors in layer.clip_factors(gamma):
                self._scale(weight, factors)
        self.reset()

    def reset(self) -> None:
        """Forget the logits seen so far."""
        for layer in self.layers:
            layer.track_logits()

    def _scale(self, weight: Tensor, factors: Tensor) -> None:
        """Multiply each row of ``weight`` by its factor, in the part of it that this rank's master holds."""
        each = self.slices.get(weight)
        if each is None:
            return
        columns = weight.shape[1]
        first, last = each.start // columns, -(-each.stop // columns)
        spread = factors[first:last].repeat_interleave(columns)
        each.master.mul_(spread[each.start - first * columns : each.stop - first * columns])


def mla_layers(chunks: Iterable[nn.Module]) -> list[GatedMla]:
    """The MLA layers of this rank, MTP's among them, in the order of the model."""
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, GatedMla)]
