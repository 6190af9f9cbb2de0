"""Settings of Muon and QK-Clip, part of the schema (``k3train/config/schema.py``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class NewtonSchulz(Enum):
    """Coefficients a, b, c of the steps X <- aX + b(XX')X + c(XX')(XX')X."""

    simple = "simple"
    """(3.4445, -4.7750, 2.0315) in every step: Muon's own, used by Moonlight and Kimi K2."""
    quintic = "quintic"
    """Five triples that are closer to orthogonal after five steps; more steps go through them again."""
    polar_express = "polar_express"
    """Eight triples of Amsel et al. 2025 (arXiv:2505.16932); more steps repeat the last."""


class MuonPrecision(Enum):
    """Dtype of the Newton-Schulz products and of the matrices on their way to their owners."""

    auto = "auto"
    """bf16 on a GPU, fp32 on the CPU."""
    bf16 = "bf16"
    fp32 = "fp32"


@dataclass(kw_only=True, slots=True)
class Muon:
    """Muon (Jordan et al. 2024) with the scale of Moonlight (arXiv:2502.16982) and K3's per-head blocks."""

    momentum: float = 0.95
    nesterov: bool = True
    newton_schulz: NewtonSchulz = NewtonSchulz.simple
    newton_schulz_steps: int = 5
    update_scale: float = 0.2
    """Updates are this times sqrt(max(rows, columns)): about AdamW's size, so both share a learning rate."""
    per_head: bool = True
    """Each head of a q, k or v projection is a matrix of its own; otherwise the projection is one."""
    adamw: list[str] = field(default_factory=list[str])
    """Matrices that take AdamW all the same, as named by `k3train show optim`; * stands for any text."""
    precision: MuonPrecision = MuonPrecision.auto


@dataclass(kw_only=True, slots=True)
class QkClip:
    """QK-Clip (Kimi K2): after a step, shrink q and k of MLA heads whose attention logits grew too large."""

    enabled: bool = False
    """Costs one more product of queries and keys in every MLA forward pass."""
    threshold: float = 100.0
    """tau: largest attention logit that a head may reach."""
