"""What travels between pipeline ranks: the running prefix and the finished blocks that the receiver lacks.

What a border carries lies side by side on the last axis of one tensor, padded with zeros to the widest
border, because megatron-core's schedules send one shape everywhere. Backward, a block's gradient retraces the
path once: each later visit of the rank leaves its share with the micro-batch, and the visit that received or
finished the block adds it to its own and returns the sum.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from k3train.backend.derivative import once_differentiable
from k3train.model.config import K3Config
from k3train.parallel.layout import Layout
from k3train.plan.borders import Border, borders, message_sources


@dataclass(slots=True)
class Kept:
    """What one pipeline rank keeps of one micro-batch from visit to visit."""

    blocks: list[Tensor] = field(default_factory=list)
    """Finished blocks after the latest visit, [s, b, hidden] each, outside that visit's graph."""
    gradients: list[Tensor] | None = None
    """Of these blocks, summed over the later visits, whose backward passes come first."""


class BlockCache:
    """Hands what a pipeline rank keeps of each micro-batch from one of its chunks to the next.

    Schedules take micro-batches through every chunk in one order, so a queue per chunk finds the right one.
    """

    def __init__(self, chunks: int) -> None:
        self._waiting: list[deque[Kept]] = [deque() for _ in range(chunks - 1)]

    def take(self, chunk: int) -> Kept:
        """What was kept of the micro-batch that ``chunk`` visits next; empty on its first visit."""
        return self._waiting[chunk - 1].popleft() if chunk > 0 else Kept()

    def leave(self, chunk: int, kept: Kept) -> None:
        """Leave ``kept`` for the chunk after ``chunk``; nothing stays after the last one."""
        if chunk < len(self._waiting):
            self._waiting[chunk].append(kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """Shape contract of the borders before and after one chunk."""

    hidden: int
    """Width of one source."""
    width: int
    """Sources side by side in a message, padding included; the same at every border of a layout."""
    before: Border | None
    after: Border | None

    def unpack(self, payload: Tensor, kept: Kept) -> tuple[Tensor, ...]:
        """[s, b, width * hidden] -> every source at the border before, [s, b, hidden] each, oldest first."""
        assert self.before is not None
        assert payload.shape[-1] == self.width * self.hidden, (
            f"payload of width {payload.shape[-1]}; this rank expects {self.width} sources of {self.hidden}"
        )
        assert len(kept.blocks) == self.before.known, (len(kept.blocks), self.before)
        return _Unpack.apply(payload, kept, self.hidden, self.before.sent)  # type: ignore[return-value]

    def pack(self, sources: tuple[Tensor, ...], kept: Kept) -> Tensor:
        """Every source at the border after -> [s, b, width * hidden], a tensor of its own; fills ``kept``."""
        assert self.after is not None
        assert len(sources) == self.after.sources, (len(sources), self.after)
        kept.blocks = [source.detach() for source in sources[:-1]]
        return _Pack.apply(kept, self.width, self.after.known, *sources)  # type: ignore[return-value]


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, payload: Tensor, kept: Kept, hidden: int, sent: int) -> tuple[Tensor, ...]:
        ctx.kept, ctx.known = kept, len(kept.blocks)
        ctx.padding = payload.shape[-1] - sent * hidden
        return (*(block.detach() for block in kept.blocks), *payload.split(hidden, dim=-1)[:sent])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.kept.gradients = list(gradients[: ctx.known])
        return _side_by_side(gradients[ctx.known :], ctx.padding), None, None, None


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kept: Kept, width: int, known: int, *sources: Tensor) -> Tensor:
        ctx.kept, ctx.known, ctx.sources, ctx.hidden = kept, known, len(sources), sources[0].shape[-1]
        return _side_by_side(sources[known:], (width - len(sources) + known) * ctx.hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        returned: list[Tensor | None] = [None] * ctx.known
        returned += gradient.split(ctx.hidden, dim=-1)[: ctx.sources - ctx.known]
        later, ctx.kept.gradients = ctx.kept.gradients, None
        for i, part in enumerate(later or ()):
            here = returned[i]
            returned[i] = part if here is None else here + part
        return None, None, None, *returned


def _side_by_side(parts: Sequence[Tensor], padding: int) -> Tensor:
    """Parts [s, b, hidden] and ``padding`` columns of zeros on the last axis."""
    if padding:
        parts = [*parts, parts[0].new_zeros(*parts[0].shape[:-1], padding)]
    return torch.cat(list(parts), dim=-1)


def make_payload(config: K3Config, layout: Layout, position: int) -> Payload:
    """The contract of the chunk at ``position`` in pipeline order."""
    block_layers = config.k3.attn_res.block_layers
    every = [None, *borders(layout, block_layers), None]
    return Payload(
        hidden=config.k3.hidden_size,
        width=message_sources(layout, block_layers),
        before=every[position],
        after=every[position + 1],
    )


def schedule_config(config: K3Config, layout: Layout) -> K3Config:
    """The config for DistributedDataParallel and the pipeline schedules: only hidden_size differs.

    The schedules take the width of their messages from it. Their hooks (``finalize_model_grads_func``,
    ``grad_scale_func``, ``no_sync_func``) belong on this one.
    """
    wide = copy.copy(config)
    wide.hidden_size = message_sources(layout, config.k3.attn_res.block_layers) * config.k3.hidden_size
    return wide
