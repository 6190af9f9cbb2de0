"""What the backward pass computes again, by kind of sublayer. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from k3train.config.schema import Model, Parallel, Recompute
from k3train.plan.counts import is_mla

HEAD_TOKENS = 2**21
"""Heads times tokens of a rank beyond which fully recomputed attention works on some heads at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputePlan:
    """One policy for each kind of sublayer."""

    kda: Recompute = Recompute.none
    mla: Recompute = Recompute.none
    """The MTP layer's attention too."""
    moe: Recompute = Recompute.none
    """The MTP layer's experts too."""
    dense: Recompute = Recompute.none
    on_host: bool = False
    """Whether the inputs of what is fully recomputed are kept on the host."""

    @property
    def saves_memory(self) -> bool:
        """Whether anything is computed again; then logits are too."""
        return any(kind is not Recompute.none for kind in (self.kda, self.mla, self.moe, self.dense))

    def of_layer(self, model: Model, layer: int) -> tuple[Recompute, Recompute]:
        """Policies of attention and feed-forward of decoder layer ``layer`` (from 0)."""
        attention = self.mla if is_mla(model, layer) else self.kda
        return attention, self.dense if layer < model.num_dense_layers else self.moe


def recompute_plan(parallel: Parallel) -> RecomputePlan:
    """Each kind's own policy, or the one for all kinds."""
    return RecomputePlan(
        kda=parallel.recompute_kda or parallel.recompute,
        mla=parallel.recompute_mla or parallel.recompute,
        moe=parallel.recompute_moe or parallel.recompute,
        dense=parallel.recompute_dense or parallel.recompute,
        on_host=parallel.recompute_offload,
    )


def head_slices(heads: int, tokens: int, ranks: int) -> list[tuple[int, int]]:
    """Heads that fully recomputed attention works on at a time, as first and number: all at once, unless the
    only one of ``ranks`` that share them has a long sequence."""
    at_once = max(1, HEAD_TOKENS // max(tokens, 1)) if ranks == 1 else heads
    return [(first, min(at_once, heads - first)) for first in range(0, heads, at_once)]
