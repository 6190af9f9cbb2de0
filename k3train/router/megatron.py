"""The router as megatron-core's own ``MoELayer`` takes it, for models that are not k3train's."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from k3train.config import schema
from k3train.config.part import read_part
from k3train.router.router import K3Router

UNTOLD_PASSES = 4096
"""Counted forward passes without an ``update_biases`` after which a warning is given, once."""

_DTYPES = {None: None, "fp32": torch.float32, "fp64": torch.float64}

_REPLACED = (
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_input_jitter_eps",
    "moe_expert_capacity_factor",
    "moe_router_num_groups",
    "moe_router_enable_expert_bias",
    "moe_router_force_load_balancing",
    "moe_router_force_biased",
    "moe_enable_routing_replay",
)
"""Options of megatron-core's own router that change what is trained and that this one does not have."""


class MegatronRouter(K3Router):
    """``K3Router`` behind megatron-core's router interface: ``MoESubmodules(router=...)`` builds it.

    ``config`` is a plain ``TransformerConfig``; its experts, top-k, initialisation,
    ``moe_router_topk_scaling_factor`` and ``moe_router_dtype`` are read. Scores are sigmoids. Call
    ``k3train.router.update.update_biases`` after each optimizer step. ``settings`` are by default K3's.
    Raises ValueError for settings that cannot be, and for options of ``config`` that would have no effect.
    """

    def __init__(
        self,
        config: Any,
        pg_collection: Any = None,
        is_mtp_layer: bool = False,
        *,
        settings: schema.Router | None = None,
    ) -> None:
        settings = read_part(settings or schema.Router(), "model.moe.router")
        _refuse_what_cannot_be(config)
        _refuse_what_has_no_effect(config, settings)
        super().__init__(config, 0, pg_collection, settings=settings)
        scale = config.moe_router_topk_scaling_factor
        self.scale = 1.0 if scale is None else scale
        # megatron-core counts layers of multi-token prediction from 1 again
        self.layers_before = config.num_layers if is_mtp_layer else 0
        self.weights_dtype = _DTYPES[config.moe_router_dtype]
        self.passes = 0

    def set_layer_number(self, layer_number: int) -> None:
        """Number under which ``update_biases`` reports this layer; those of multi-token prediction follow
        the decoder's."""
        self.layer_number = self.layers_before + layer_number

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """[s, b, hidden] -> weights and choices, bool, each [s*b, experts].

        Weights have ``moe_router_dtype``, else the input's dtype; they are computed in fp32 either way.
        ``padding_mask``, bool [s, b], is True on tokens that are not counted. There may be no tokens.
        Raises ValueError for other shapes.
        """
        self._check_shapes(input, padding_mask)
        if self.training and torch.is_grad_enabled():
            self._expect_update()
        valid = None if padding_mask is None else padding_mask.reshape(-1).logical_not()
        experts, weights = super().forward(input, valid)
        shape = weights.shape[0], self.num_experts
        dense = torch.zeros(shape, dtype=weights.dtype, device=weights.device)
        chosen = torch.zeros(shape, dtype=torch.bool, device=weights.device).scatter_(1, experts, True)
        dense = dense.scatter(1, experts, weights) * self.scale
        return dense.to(self.weights_dtype or input.dtype), chosen

    def reset(self) -> None:
        """Forget what this step's tokens did."""
        super().reset()
        self.passes = 0

    def _check_shapes(self, input: Tensor, padding_mask: Tensor | None) -> None:
        width = self.weight.shape[1]
        if input.ndim != 3 or input.shape[2] != width:
            raise ValueError(f"input has shape {tuple(input.shape)}: the router needs [s, b, {width}]")
        if padding_mask is not None and padding_mask.shape != input.shape[:2]:
            raise ValueError(
                f"padding_mask has shape {tuple(padding_mask.shape)}: the router needs [s, b] = "
                f"{list(input.shape[:2])}, as megatron-core's MoELayer hands it on"
            )

    def _expect_update(self) -> None:
        self.passes += 1
        if self.passes == UNTOLD_PASSES:
            warnings.warn(
                f"the router of layer {self.layer_number} has counted {self.passes} forward passes since its "
                "bias was last updated, so nothing balances the experts: call "
                "k3train.router.update.update_biases after each optimizer step",
                stacklevel=2,
            )


def _refuse_what_cannot_be(config: Any) -> None:
    if config.num_moe_experts is None:
        raise ValueError("num_moe_experts is None: set the number of experts in the TransformerConfig")
    scale = config.moe_router_topk_scaling_factor
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(
            f"moe_router_topk_scaling_factor={scale} must be a number above 0; None stands for 1"
        )
    if config.moe_router_dtype not in _DTYPES:
        raise ValueError(
            f"moe_router_dtype={config.moe_router_dtype} must be fp32 or fp64, or None for the input's dtype"
        )


def _refuse_what_has_no_effect(config: Any, settings: schema.Router) -> None:
    if settings.input is schema.RouterInput.latent:
        raise ValueError(
            "model.moe.router.input = latent, but megatron-core's MoELayer hands its router the full hidden "
            "state: use hidden"
        )
    if settings.rule is schema.RouterRule.aux_loss and not config.calculate_per_token_loss:
        raise ValueError(
            "the auxiliary loss is a sum over tokens: set calculate_per_token_loss=True, or use "
            "megatron-core's own router and its moe_aux_loss_coeff"
        )
    on = [f"{name}={value}" for name in _REPLACED if _is_on(value := getattr(config, name, None))]
    if config.moe_router_load_balancing_type == "sinkhorn":
        on.append("moe_router_load_balancing_type=sinkhorn")
    if on:
        raise ValueError(
            f"{', '.join(on)} would have no effect: MegatronRouter stands in for megatron-core's router, "
            "whose options these are; take them out of the TransformerConfig"
        )


def _is_on(value: Any) -> bool:
    return any(value) if isinstance(value, (list, tuple)) else bool(value)
