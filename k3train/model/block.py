"""The decoder layers of one pipeline chunk."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from k3train.kernels.packing import Packing
from k3train.model.config import K3Config
from k3train.model.layer import K3Layer, advance


class K3Block(MegatronModule):
    """Consecutive decoder layers, named by their number in the whole model on every layout.

    Not a subclass of megatron-core's ``TransformerBlock``: it carries one hidden state where this carries the
    sources of attention residuals, splits layers by its own rule, and renumbers them from 0 on each rank.
    """

    config: K3Config

    def __init__(self, config: K3Config, layers: range, pg_collection: Any) -> None:
        super().__init__(config)
        self.tp_group = pg_collection.tp
        self.indices = layers
        for index in layers:
            self.add_module(str(index), K3Layer(config, index, pg_collection))

    def forward(self, sources: tuple[Tensor, ...], packing: Packing) -> tuple[Tensor, ...]:
        """Sources of attention residuals before the first layer -> after the last, each [s, b, hidden]."""
        for layer in self.children():
            assert isinstance(layer, K3Layer)
            sources = advance(sources, layer(*sources, packing=packing), layer.starts_block)
        return sources
