"""Dense feed-forward with SiTU-GLU: the leading layers' and, inside the MoE, the shared experts'."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from k3train.config import schema
from k3train.kernels.linear import linears
from k3train.kernels.recompute import make_again
from k3train.kernels.situ import situ_glu
from k3train.model.config import fp8_recipe, part_settings
from k3train.model.inputs import check_hidden
from k3train.model.projections import ColumnLinear, RowLinear, weight_for


class SituMlp(MegatronModule):
    """down(SiTU-GLU(gate(x), up(x))) without biases, its inner width sharded over tp (k3 report eq. 12).

    ``ffn_size`` is the whole inner width. The caps come from ``settings``, else from ``config.k3.situ``.
    ``selective``: gathered inputs and activations are made again.
    """

    def __init__(
        self,
        config: TransformerConfig,
        ffn_size: int,
        pg_collection: Any,
        *,
        settings: schema.Situ | None = None,
        selective: bool = False,
        **_: Any,
    ) -> None:
        super().__init__(config)
        self.selective = selective
        assert config.init_method is not None
        caps = part_settings(settings, config, "situ")
        self.caps = caps.gate_cap, caps.up_cap
        self.tp_group = pg_collection.tp
        column = partial(
            ColumnLinear,
            config.hidden_size,
            ffn_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            disable_grad_reduce=True,
            tp_group=self.tp_group,
        )
        self.gate_proj, self.up_proj = column(), column()
        # Both read one input, so it is gathered here, once, and its gradient is reduced once.
        self.gate_proj.sequence_parallel = self.up_proj.sequence_parallel = False
        self.down_proj = RowLinear(
            ffn_size,
            config.hidden_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=self.tp_group,
        )

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
        """[s, b, hidden] -> [s, b, hidden], s sharded over tp under sequence parallelism; no bias.

        Every rank of tp must call this. Raises ValueError for another shape or dtype.
        """
        check_hidden(hidden, self.gate_proj)
        return make_again(self._gather, self._feed, hidden, on=self.selective), None

    def is_repeatable(self) -> bool:
        """Whether a pass is the same kernels every time, without work for the host or other ranks."""
        return self.tp_group.size() == 1

    def _gather(self, hidden: Tensor) -> Tensor:
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, group=self.tp_group)
        return copy_to_tensor_model_parallel_region(hidden, group=self.tp_group)

    def inputs(self, hidden: Tensor) -> list[Tensor]:
        """What multiplies ``hidden``, for a caller who has other products of it: ``feed`` takes the results.
        Only where a pass is repeatable."""
        return [weight_for(hidden, module) for module in (self.gate_proj, self.up_proj)]

    def _feed(self, hidden: Tensor) -> Tensor:
        return self.feed(*linears(hidden, self.inputs(hidden), fp8_recipe(self.config)))

    def feed(self, gate: Tensor, up: Tensor) -> Tensor:
        """What follows the first two products: [s, b, inner / tp] each -> [s, b, hidden]."""
        return make_again(
            lambda gate, up: situ_glu(gate, up, *self.caps),
            lambda inner: self.down_proj(inner)[0],
            gate,
            up,
            on=self.selective,
        )
