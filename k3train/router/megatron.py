"""The router as megatron-core's own ``MoELayer`` takes it, for models that are not k3train's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3train.config import schema
from k3train.router.router import K3Router


class MegatronRouter(K3Router):
    """``K3Router`` behind megatron-core's router interface: ``MoESubmodules(router=...)`` builds it.

    ``config`` is a plain ``TransformerConfig``; its experts, top-k, initialisation and
    ``moe_router_topk_scaling_factor`` are read, the options of megatron-core's own router are not. Call
    ``k3train.router.update.update_biases`` after each optimizer step. ``settings`` are by default K3's.
    """

    def __init__(
        self,
        config: Any,
        pg_collection: Any = None,
        is_mtp_layer: bool = False,
        *,
        settings: schema.Router | None = None,
    ) -> None:
        settings = settings or schema.Router()
        if settings.rule is schema.RouterRule.aux_loss and not config.calculate_per_token_loss:
            raise ValueError(
                "the auxiliary loss is a sum over tokens: set calculate_per_token_loss=True, or use "
                "megatron-core's own router and its moe_aux_loss_coeff"
            )
        super().__init__(config, 0, pg_collection, settings=settings)
        self.scale = config.moe_router_topk_scaling_factor or 1.0

    def set_layer_number(self, layer_number: int) -> None:
        """Number under which ``update_biases`` reports this layer."""
        self.layer_number = layer_number

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """[s, b, hidden] -> weights in the input's dtype and choices, bool, each [s*b, experts].

        ``padding_mask``, bool [s, b], is True on tokens that are not counted.
        """
        valid = None if padding_mask is None else padding_mask.reshape(-1).logical_not()
        experts, weights = super().forward(input, valid)
        shape = weights.shape[0], self.num_experts
        dense = torch.zeros(shape, dtype=weights.dtype, device=weights.device)
        chosen = torch.zeros(shape, dtype=torch.bool, device=weights.device).scatter_(1, experts, True)
        return (dense.scatter(1, experts, weights) * self.scale).to(input.dtype), chosen
