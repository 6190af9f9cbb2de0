"""Smallest and largest value of every number in the schema: fp32, in which models compute, holds them all;
and which texts must hold something."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any, cast

from k3train.config.keys import ANY_NAME
from k3train.config.problems import ConfigProblem
from k3train.config.schema import Run
from k3train.config.texts import FILLED


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from ``low`` to ``high``, both included unless marked."""

    low: float
    high: float = float("inf")
    without_low: bool = False
    without_high: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.without_low else value >= self.low
        below = value < self.high if self.without_high else value <= self.high
        return above and below

    def broken_by(self, value: float) -> tuple[str, str]:
        """Rule that a value outside breaks, and its fix."""
        too_low = value < self.low or (self.without_low and value == self.low)
        bound = _number(self.low if too_low else self.high)
        if self.without_low if too_low else self.without_high:
            side = "more than" if too_low else "less than"
            return f"must be {side} {bound}", f"Use a number {side} {bound}"
        return (
            f"must be at {'least' if too_low else 'most'} {bound}",
            f"Use {bound}{' or more' if too_low else ' or less'}",
        )

    def inside(self) -> float:
        """Some number that lies in the range."""
        if self.high == float("inf"):
            return self.low + 1 if self.without_low else self.low
        return (self.low + self.high) / 2 if self.without_low else self.low


_ONE = Range(1, 2**31 - 1)
"""Sizes and degrees: what an int32 holds, so that no arithmetic on them is long or overflows."""
_ZERO = Range(0, 2**31 - 1)
_TOKENS = Range(1, 10**15)
"""A hundred times what the largest runs have trained on."""
_ANY_TOKENS = Range(0, 10**15)
_EPS = Range(1e-20, 1)
"""Beside squares in fp32, which vanish below 1e-38: a smaller one divides what is left by nothing."""
_RATE = Range(1e-15, 1e3)
_DECAY = Range(0, 0.999999)
"""fp32 holds no number between the next larger ones and 1."""
_AT_LEAST_0 = Range(0)
_POSITIVE = Range(0, without_low=True)
_SHARE = Range(0, 1)

RANGES: dict[str, Range] = {
    "seed": Range(0, 2**32 - 1),
    "model.num_layers": Range(1, 10_000),
    "model.hidden_size": _ONE,
    "model.num_heads": _ONE,
    "model.vocab_size": _ONE,
    "model.num_dense_layers": _ZERO,
    "model.dense_ffn_size": _ONE,
    "model.mla_every": _ONE,
    "model.mla_layers.*": _ZERO,
    "model.norm_eps": _EPS,
    "model.init_std": Range(1e-9, 1e3),
    "model.kda.head_dim": _ONE,
    "model.kda.conv_kernel": _ONE,
    "model.kda.decay_rank": _ONE,
    "model.kda.gate_lower_bound": Range(-5, -1e-6),
    "model.kda.dt_min": Range(1e-9, 1e3),
    "model.kda.dt_max": Range(1e-9, 1e3),
    "model.kda.norm_eps": _EPS,
    "model.mla.q_lora_rank": _ONE,
    "model.mla.kv_lora_rank": _ONE,
    "model.mla.qk_head_dim": _ONE,
    "model.mla.qk_shared_head_dim": _ONE,
    "model.mla.v_head_dim": _ONE,
    "model.mla.norm_eps": _EPS,
    "model.attn_res.block_layers": _ONE,
    "model.moe.num_experts": _ONE,
    "model.moe.top_k": _ONE,
    "model.moe.expert_ffn_size": _ONE,
    "model.moe.latent_size": _ONE,
    "model.moe.num_shared_experts": _ONE,
    "model.moe.shared_ffn_size": _ONE,
    "model.moe.router.quantile.bins": Range(2, 2**16),
    "model.moe.router.quantile.range": Range(1e-6, 1e6),
    "model.moe.router.quantile.window": _ONE,
    "model.moe.router.quantile.strength": Range(1e-6, 1),
    "model.moe.router.sign.rate": Range(1e-9, 1e3),
    "model.moe.router.aux_loss.coefficient": Range(0, 1e6),
    "model.situ.gate_cap": Range(1e-3, 1e6),
    "model.situ.up_cap": Range(1e-3, 1e6),
    "model.mtp.num_layers": _SHARE,
    "model.mtp.loss_weight": Range(0, 1e3),
    "parallel.tp": _ONE,
    "parallel.pp": _ONE,
    "parallel.vp": _ONE,
    "parallel.cp": _ONE,
    "parallel.ep": _ONE,
    "parallel.etp": _ONE,
    "parallel.pipeline_split.*": _ONE,
    "optim.learning_rate": _RATE,
    "optim.min_learning_rate": Range(0, 1e3),
    "optim.warmup_fraction": _SHARE,
    "optim.decay_fraction": _SHARE,
    "optim.beta1": _DECAY,
    "optim.beta2": _DECAY,
    "optim.eps": _EPS,
    "optim.weight_decay": Range(0, 1e3),
    "optim.clip_grad_norm": Range(0, 1e30),
    "optim.muon.momentum": _DECAY,
    "optim.muon.newton_schulz_steps": Range(1, 100),
    "optim.muon.update_scale": Range(1e-6, 1e6),
    "optim.qk_clip.threshold": Range(1e-6, 1e9),
    "data.sources.*.min_document_tokens": _ANY_TOKENS,
    "data.sources.*.max_epochs": Range(0, 1e6, without_low=True),
    "data.pack_window_tokens": _TOKENS,
    "data.prefetch_steps": _ZERO,
    "curriculum.stages.*.context_tokens": Range(2, 2**31 - 1),
    "curriculum.stages.*.tokens": _TOKENS,
    "curriculum.stages.*.batch_tokens": _TOKENS,
    "curriculum.stages.*.micro_batch_sequences": _ONE,
    "curriculum.stages.*.mix.*": Range(0, 1e9),
    "curriculum.stages.*.mtp_loss_weight": Range(1e-9, 1e3),
    "curriculum.stages.*.learning_rate.peak": _RATE,
    "curriculum.stages.*.learning_rate.warmup_tokens": _ANY_TOKENS,
    "curriculum.stages.*.parallel.tp": _ONE,
    "curriculum.stages.*.parallel.pp": _ONE,
    "curriculum.stages.*.parallel.vp": _ONE,
    "curriculum.stages.*.parallel.cp": _ONE,
    "curriculum.stages.*.parallel.ep": _ONE,
    "curriculum.stages.*.parallel.etp": _ONE,
    "curriculum.stages.*.parallel.pipeline_split.*": _ONE,
    "curriculum.eval_tokens": _TOKENS,
    "curriculum.eval_every_steps": _ZERO,
    "checkpoint.every_steps": _ZERO,
    "checkpoint.keep": Range(2, 2**31 - 1),
    "checkpoint.max_failures": _ONE,
    "monitor.console_every_steps": _ONE,
    "monitor.balance.layers_every_steps": _ZERO,
    "monitor.balance.audit_every_steps": _ZERO,
    "monitor.balance.save_every_steps": _ZERO,
    "monitor.balance.alarms.patience_steps": _ONE,
    "monitor.balance.alarms.max_violation": _AT_LEAST_0,
    "monitor.balance.alarms.dead_experts": _ZERO,
    "monitor.balance.alarms.causal_lag": _AT_LEAST_0,
    "monitor.balance.alarms.bias_range": _AT_LEAST_0,
    "monitor.balance.alarms.saturated_experts": _ZERO,
    "guards.spike_window_steps": Range(8, 100_000),
    "guards.spike_score": _POSITIVE,
    "guards.max_skipped_in_a_row": _ZERO,
    "guards.rollback_steps": _ONE,
    "guards.max_rollbacks": _ZERO,
    "guards.replay_every_steps": _ZERO,
    "guards.digest_every_steps": _ZERO,
    "guards.straggler_every_steps": _ZERO,
    "guards.straggler_ratio": Range(1, without_low=True),
    "guards.hang_floor_seconds": _ONE,
    "guards.hang_ceiling_seconds": _ZERO,
    "cluster.nodes": Range(1, 1_000_000),
    "cluster.ranks_per_node": Range(1, 1024),
    "cluster.threads_per_rank": Range(1, 1024),
    "cluster.device_memory_gib": Range(0, 1e6),
    "cluster.collective_timeout_seconds": _ONE,
    "cluster.min_nodes": Range(0, 1_000_000),
    "cluster.max_restarts": _ZERO,
    "cluster.restart_delay_seconds": Range(0, 1e6),
    "cluster.time_limit_minutes": _ZERO,
    "cluster.stop_margin_seconds": _ZERO,
}


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"


def range_problems(run: Run, *, repair: bool = False) -> Iterator[ConfigProblem]:
    """Every number outside its range, and every text that must not be empty and is; ``repair`` replaces
    them, so that other rules can go on."""
    yield from _walk(run, "", "", repair)


def _walk(node: Any, path: str, pattern: str, repair: bool) -> Iterator[ConfigProblem]:
    for name, value, put in _children(node):
        key = f"{path}.{name}" if path else str(name)
        own = str(name) if is_dataclass(node) else ANY_NAME
        own_pattern = f"{pattern}.{own}" if pattern else own
        if is_dataclass(value) or isinstance(value, (dict, list)):
            yield from _walk(value, key, own_pattern, repair)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            allowed = RANGES[own_pattern]
            if value not in allowed:
                yield ConfigProblem(key, value, *allowed.broken_by(value), "range")
                if repair:
                    put(type(value)(allowed.inside()))
        elif isinstance(value, str) and not value.strip() and (fix := FILLED[own_pattern]):
            yield ConfigProblem(key, value, "must not be empty", fix, "empty")
            if repair:
                put("empty")


def _children(node: Any) -> Iterator[tuple[str | int, Any, Callable[[Any], None]]]:
    """Name, value and a function that replaces the value."""
    if is_dataclass(node):
        for field in fields(node):
            yield field.name, getattr(node, field.name), partial(setattr, node, field.name)
        return
    container = cast("dict[str | int, Any]", node)
    names = list(container) if isinstance(node, dict) else list(range(len(container)))
    for name in names:
        yield name, container[name], partial(container.__setitem__, name)
