"""Which rule a router was asked for."""

from __future__ import annotations

from typing import Any

from k3train.config import schema
from k3train.router.aux_loss import AuxLossBalance
from k3train.router.contract import BalanceRule
from k3train.router.none import NoBalance
from k3train.router.quantile import QuantileBalance
from k3train.router.quantile_exact import ExactQuantileBalance
from k3train.router.sign import SignBalance


def make_rule(
    settings: schema.Router, num_experts: int, top_k: int, micro_batch_group: Any = None
) -> BalanceRule:
    """The rule that ``model.moe.router.rule`` names.

    ``micro_batch_group`` holds the ranks that share a micro-batch (tp x cp); None when this rank has all of
    it. Raises ValueError for no choice, for more choices than experts, and when a quantile is asked for and
    every expert is always chosen.
    """
    sizes = f"model.moe.top_k={top_k} (moe_router_topk)", f"model.moe.num_experts={num_experts}"
    if not isinstance(top_k, int) or top_k < 1:
        raise ValueError(f"{sizes[0]} must be a whole number from 1 to {sizes[1]}")
    if top_k > num_experts:
        raise ValueError(f"{sizes[0]} is more than {sizes[1]}: lower top_k")
    quantiles = (schema.RouterRule.quantile, schema.RouterRule.quantile_exact)
    if settings.rule in quantiles and top_k >= num_experts:
        raise ValueError(
            f"model.moe.router.rule={settings.rule.value} compares the {top_k} chosen experts with the next "
            f"best, so {sizes[0]} must be less than {sizes[1]}; lower top_k or set "
            "model.moe.router.rule=none"
        )
    match settings.rule:
        case schema.RouterRule.quantile:
            return QuantileBalance(num_experts, top_k, settings.quantile)
        case schema.RouterRule.quantile_exact:
            return ExactQuantileBalance(num_experts, top_k, settings.quantile_exact, settings.quantile)
        case schema.RouterRule.sign:
            return SignBalance(num_experts, settings.sign.rate)
        case schema.RouterRule.aux_loss:
            return AuxLossBalance(num_experts, settings.aux_loss, micro_batch_group)
        case schema.RouterRule.none:
            return NoBalance(num_experts)
