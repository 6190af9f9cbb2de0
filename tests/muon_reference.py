"""Muon, AdamW and QK-Clip in plain loops over whole tensors, written from the formulas alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from k3train.config import schema

ADAMW = ("embedding", "output_head", "router", "norm", "conv", "A_log", "dt_bias", "query")
"""Parts of the names that AdamW updates."""
UNDECAYED = ("norm", "conv", "A_log", "dt_bias", "query")


class PlainMuon:
    """One process, whole tensors, no batching."""

    def __init__(self, model: schema.Model, optim: schema.Optim, weights: dict[str, Tensor]) -> None:
        self.model, self.optim = model, optim
        self.weights = {name: value.double().clone() for name, value in weights.items()}
        self.first = {name: torch.zeros_like(value) for name, value in self.weights.items()}
        self.second = {name: torch.zeros_like(value) for name, value in self.weights.items()}
        self.steps = 0

    def step(self, gradients: dict[str, Tensor], rate: float) -> None:
        self.steps += 1
        for name, gradient in gradients.items():
            w, g = self.weights[name], gradient.double()
            if not any(part in name for part in UNDECAYED):
                w.mul_(1 - rate * self.optim.weight_decay)
            w.sub_(rate * (self._adamw(name, g) if self.is_adamw(name) else self._muon(name, g)))

    def is_adamw(self, name: str) -> bool:
        return any(part in name for part in ADAMW)

    def _adamw(self, name: str, g: Tensor) -> Tensor:
        b1, b2 = self.optim.beta1, self.optim.beta2
        m = self.first[name].mul_(b1).add_(g, alpha=1 - b1)
        v = self.second[name].mul_(b2).add_(g * g, alpha=1 - b2)
        return (m / (1 - b1**self.steps)) / ((v / (1 - b2**self.steps)).sqrt() + self.optim.eps)

    def _muon(self, name: str, g: Tensor) -> Tensor:
        mu = self.optim.muon.momentum
        m = self.first[name].mul_(mu).add_(g)
        direction = g + mu * m if self.optim.muon.nesterov else m
        return torch.cat([self._update(block) for block in self._blocks(name, direction)]).view_as(g)

    def _blocks(self, name: str, x: Tensor) -> list[Tensor]:
        heads, mla = self.model.num_heads, self.model.mla
        if x.dim() == 3:
            return list(x)
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")) and self.optim.muon.per_head:
            return list(x.chunk(heads))
        if name.endswith("q_b.weight") and self.optim.muon.per_head:
            return list(x.chunk(heads))
        if name.endswith("kv_b.weight") and self.optim.muon.per_head:
            return [part for head in x.chunk(heads) for part in head.split([mla.qk_head_dim, mla.v_head_dim])]
        return [x]

    def _update(self, x: Tensor) -> Tensor:
        rows, columns = x.shape
        x = x / max(float(x.norm()), 1e-7)
        for _ in range(self.optim.muon.newton_schulz_steps):
            x = 3.4445 * x - 4.7750 * (x @ x.T @ x) + 2.0315 * (x @ x.T @ x @ x.T @ x)
        return self.optim.muon.update_scale * math.sqrt(max(rows, columns)) * x

    def clip(self, layer: str, largest: Tensor) -> None:
        """QK-Clip of one MLA layer, given each head's largest logit."""
        mla = self.model.mla
        for head, logit in enumerate(largest.tolist()):
            gamma = min(1.0, self.optim.qk_clip.threshold / logit) if logit > 0 else 1.0
            q = self.weights[f"{layer}.q_b.weight"].chunk(self.model.num_heads)[head]
            kv = self.weights[f"{layer}.kv_b.weight"].chunk(self.model.num_heads)[head]
            q[: mla.qk_head_dim] *= math.sqrt(gamma)
            q[mla.qk_head_dim :] *= gamma
            kv[: mla.qk_head_dim] *= math.sqrt(gamma)
