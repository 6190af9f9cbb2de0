"""Settings of the router and of what is recorded about the balance of experts; a part of schema.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class RouterRule(Enum):
    """How the router is kept balanced."""

    quantile = "quantile"
    """Quantile balancing from a histogram over the global batch (K3)."""
    quantile_exact = "quantile_exact"
    """Quantile balancing by sorting the margins themselves; for tests and small runs."""
    sign = "sign"
    """A fixed step of the bias against each expert's error (DeepSeek-V3, auxiliary-loss-free)."""
    aux_loss = "aux_loss"
    """An auxiliary loss (GShard, Switch); the bias stays."""
    none = "none"
    """No balancing; the bias stays."""


class RouterInput(Enum):
    """What the router reads."""

    hidden = "hidden"
    """The full width, as the shared experts do (K3)."""
    latent = "latent"
    """The experts' latent, after its down-projection."""


class BalanceScope(Enum):
    """Over which tokens a rule balances."""

    global_batch = "global_batch"
    """All tokens of an optimizer step, on all ranks."""
    micro_batch = "micro_batch"
    """Those of one micro-batch."""


@dataclass(kw_only=True, slots=True)
class Quantile:
    """Quantile balancing; window and strength also hold for rule quantile_exact."""

    bins: int = 1000
    """Bins of the histogram, per expert: each rank holds 4 bytes a bin and expert in each layer, and 8 more
    while they are summed. Beyond some 1000 the next batch no longer sees the difference."""
    range: float | None = None
    """Bins lie between -range and range; null puts them where margins can be, between the smallest bias - 1
    and the largest bias + 1."""
    window: int = 1
    """Steps that the estimate averages over."""
    strength: float = 1.0
    """How far the bias moves toward the estimate in a step; 1 sets it."""


@dataclass(kw_only=True, slots=True)
class QuantileExact:
    """Exact quantile balancing."""

    scope: BalanceScope = BalanceScope.global_batch
    """global_batch gathers all margins at the end of a step; micro_batch averages each rank's quantiles."""


@dataclass(kw_only=True, slots=True)
class SignBias:
    """Sign rule."""

    rate: float = 0.001
    """Step of the bias, in units of score (DeepSeek-V3's)."""


@dataclass(kw_only=True, slots=True)
class AuxLoss:
    """Auxiliary loss."""

    coefficient: float = 0.01
    """Weight in the training loss (Switch's)."""
    scope: BalanceScope = BalanceScope.global_batch
    """Where an expert's share of choices is counted: the last step's global batch or this micro-batch."""


@dataclass(kw_only=True, slots=True)
class Router:
    """Sigmoid router with a selection-only bias; below it, the settings of each rule."""

    rule: RouterRule = RouterRule.quantile
    input: RouterInput = RouterInput.hidden
    quantile: Quantile = field(default_factory=Quantile)
    quantile_exact: QuantileExact = field(default_factory=QuantileExact)
    sign: SignBias = field(default_factory=SignBias)
    aux_loss: AuxLoss = field(default_factory=AuxLoss)


@dataclass(kw_only=True, slots=True)
class BalanceAlarms:
    """Above which number, in the worst layer, an event tells of bad balance; null for none."""

    patience_steps: int = 100
    """Steps in a row that a number must be above its threshold."""
    max_violation: float | None = 1.0
    """(Busiest expert's load) / (mean load) - 1."""
    dead_experts: int | None = 0
    """Experts of one layer without a token."""
    causal_lag: float | None = 0.5
    """Mean absolute violation beyond that of independent tokens: the bias fits another batch."""
    bias_range: float | None = 1.5
    """Largest less smallest bias; scores themselves lie in (0, 1)."""
    saturated_experts: int | None = 0
    """Experts whose quantile lies at an end of the histogram."""


@dataclass(kw_only=True, slots=True)
class BalanceMonitor:
    """What is recorded about the balance of experts."""

    layers_every_steps: int = 1
    """Record every layer's numbers every so many steps; 0 for never, but for audited steps."""
    audit_every_steps: int = 0
    """Every so many steps also compare with the exact quantile and with the batch's own bias; keeps and
    gathers all scores of such a step, 4 bytes a token and expert in each layer. 0 for never."""
    save_every_steps: int = 0
    """Write loads and histograms to <dir>/balance every so many steps; 0 for never."""
    alarms: BalanceAlarms = field(default_factory=BalanceAlarms)
