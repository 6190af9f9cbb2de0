"""What travels between pipeline ranks: every finished block and the running prefix, in one tensor.

megatron-core's schedules send one tensor of one shape, [s, b, hidden_size of their config], between any two
neighbours. All sources lie side by side on the last axis, padded with zeros to the widest border.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from k3train.model.config import K3Config
from k3train.parallel.layout import Layout


def num_sources(block_layers: int, done: int) -> int:
    """Finished blocks (the embedding among them) and the running prefix after ``done`` decoder layers."""
    return -(-done // block_layers) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadShape:
    """Shape contract of the payload, the same at every border of one layout."""

    hidden: int
    """Width of one source."""
    width: int
    """Sources side by side, padding included."""
    block_layers: int

    def pack(self, sources: tuple[Tensor, ...], done: int) -> Tensor:
        """w tensors [s, b, hidden] after ``done`` layers -> [s, b, width * hidden], a tensor of its own."""
        expected = num_sources(self.block_layers, done)
        assert len(sources) == expected <= self.width, (len(sources), expected, self.width)
        missing = self.width - len(sources)
        parts = list(sources)
        if missing:
            parts.append(sources[0].new_zeros(*sources[0].shape[:-1], missing * self.hidden))
        return torch.cat(parts, dim=-1)

    def unpack(self, payload: Tensor, done: int) -> tuple[Tensor, ...]:
        """The sources after ``done`` layers: views [s, b, hidden] of the payload."""
        assert payload.shape[-1] == self.width * self.hidden, (
            f"payload of width {payload.shape[-1]} before layer {done}; "
            f"this rank expects {self.width} sources of {self.hidden}"
        )
        return payload.split(self.hidden, dim=-1)[: num_sources(self.block_layers, done)]


def payload_shape(config: K3Config, layout: Layout) -> PayloadShape:
    """The contract of a layout: as wide as its widest border needs."""
    block_layers = config.k3.attn_res.block_layers
    last_border = sum(layout.pipeline_split[:-1])
    return PayloadShape(
        hidden=config.k3.hidden_size,
        width=num_sources(block_layers, last_border),
        block_layers=block_layers,
    )


def schedule_config(config: K3Config, layout: Layout) -> K3Config:
    """The config for DistributedDataParallel and the pipeline schedules: only hidden_size differs.

    The schedules take the width of their messages from it. Their hooks (``finalize_model_grads_func``,
    ``grad_scale_func``, ``no_sync_func``) belong on this one.
    """
    shape = payload_shape(config, layout)
    wide = copy.copy(config)
    wide.hidden_size = shape.width * shape.hidden
    return wide
