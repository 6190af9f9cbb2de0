"""The whole text model from its formulas, one document at a time, without any of k3train's code.

Weights are a dict under k3train's checkpoint names; every equation number is of the k3 report. Precision is
that of the weights. Experts are chosen here, so compare with weights whose routing margins are wide.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from k3train.config.schema import Model

Weights = dict[str, Tensor]


class Reference:
    """``Reference(model, weights)(tokens)``: logits of one document."""

    def __init__(self, model: Model, weights: Weights) -> None:
        self.model, self.weights = model, weights
        self.margins: list[float] = []
        """Smallest gap between the last chosen and the first not chosen expert, per MoE call."""

    def __call__(self, tokens: Tensor) -> Tensor:
        """int [t] -> logits [t, vocabulary]."""
        return self.head(self.norm(self.trunk(tokens), "final_norm"))

    def head(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weights["output_head.weight"].T

    def trunk(self, tokens: Tensor) -> Tensor:
        """Eq. 8-10, block form: input of the final norm."""
        m = self.model
        prefix, bank = self.weights["embedding.weight"][tokens], []
        for layer in range(m.num_layers):
            name = f"layers.{layer}"
            h = self.mix([*bank, prefix], f"{name}.attention_mix") if bank else prefix
            starts = layer % m.attn_res.block_layers == 0
            if starts:
                bank.append(prefix)
            attend = self.mla if self.is_mla(layer) else self.kda
            a = attend(self.norm(h, f"{name}.attention_norm"), f"{name}.attention")
            prefix = a if starts else prefix + a
            h = self.norm(self.mix([*bank, prefix], f"{name}.ffn_mix"), f"{name}.ffn_norm")
            ffn = self.mlp if layer < m.num_dense_layers else self.moe
            prefix = prefix + ffn(h, f"{name}.ffn")
        return self.mix([*bank, prefix], "output_mix")

    def mtp(self, trunk: Tensor, following: Tensor) -> Tensor:
        """Logits for the token after next, from the trunk's output and the next tokens [t]."""
        embedded = self.norm(self.weights["embedding.weight"][following], "mtp.embedding_norm")
        both = torch.cat([self.norm(trunk, "mtp.hidden_norm"), embedded], -1)
        x = both @ self.weights["mtp.projection.weight"].T
        x = x + self.mla(self.norm(x, "mtp.attention_norm"), "mtp.attention")
        x = x + self.moe(self.norm(x, "mtp.ffn_norm"), "mtp.ffn")
        return self.head(self.norm(x, "mtp.final_norm"))

    def is_mla(self, layer: int) -> bool:
        return layer % self.model.mla_every == self.model.mla_every - 1 or layer == self.model.num_layers - 1

    def norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        return _rms(x, self.model.norm_eps if eps is None else eps) * self.weights[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def mix(self, sources: list[Tensor], name: str) -> Tensor:
        values = torch.stack(sources)
        keys = _rms(values, self.model.norm_eps) * self.weights[f"{name}.norm_weight"]
        return ((keys @ self.weights[f"{name}.query"]).softmax(0)[..., None] * values).sum(0)

    def mla(self, x: Tensor, name: str) -> Tensor:
        """Eq. 7, without positions."""
        mla, heads = self.model.mla, self.model.num_heads
        q = self.norm(self.linear(x, f"{name}.q_a"), f"{name}.q_a_norm", mla.norm_eps)
        q = self.linear(q, f"{name}.q_b").unflatten(-1, (heads, -1))
        c, shared = self.linear(x, f"{name}.kv_a").split([mla.kv_lora_rank, mla.qk_shared_head_dim], -1)
        kv = self.linear(self.norm(c, f"{name}.kv_a_norm", mla.norm_eps), f"{name}.kv_b")
        k, v = kv.unflatten(-1, (heads, -1)).split([mla.qk_head_dim, mla.v_head_dim], -1)
        k = torch.cat([k, shared[:, None].expand(-1, heads, -1)], -1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * (mla.qk_head_dim + mla.qk_shared_head_dim) ** -0.5
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        p = scores.masked_fill(later, -torch.inf).softmax(-1)
        out = torch.einsum("hqk,khe->qhe", p, v).flatten(1)
        return self.linear(out * torch.sigmoid(self.linear(x, f"{name}.g_proj")), f"{name}.o_proj")

    def kda(self, x: Tensor, name: str) -> Tensor:
        """Eq. 1-6, token by token."""
        kda, heads = self.model.kda, self.model.num_heads

        def short_conv(part: str) -> Tensor:
            y, taps = self.linear(x, f"{name}.{part}_proj"), self.weights[f"{name}.{part}_conv"]
            y = F.conv1d(F.pad(y.T[None], (kda.conv_kernel - 1, 0)), taps[:, None], groups=len(taps))
            return F.silu(y[0].T).unflatten(-1, (heads, -1))

        q, k, v = (short_conv(part) for part in "qkv")
        q, k = _unit(q) * kda.head_dim**-0.5, _unit(k)
        beta = torch.sigmoid(self.linear(x, f"{name}.b_proj"))
        z = self.linear(self.linear(x, f"{name}.f_a"), f"{name}.f_b") + self.weights[f"{name}.dt_bias"]
        rate = self.weights[f"{name}.A_log"].exp()[:, None] * z.unflatten(-1, (heads, -1))
        decay = torch.exp(kda.gate_lower_bound * torch.sigmoid(rate))
        state, out = x.new_zeros(heads, kda.head_dim, kda.head_dim), []
        for t in range(len(x)):
            state = state * decay[t, :, :, None]
            error = beta[t, :, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
            state = state + torch.einsum("hk,hv->hkv", k[t], error)
            out.append(torch.einsum("hk,hkv->hv", q[t], state))
        out = (_rms(torch.stack(out), kda.norm_eps) * self.weights[f"{name}.o_norm"]).flatten(1)
        return self.linear(out * torch.sigmoid(self.linear(x, f"{name}.g_proj")), f"{name}.o_proj")

    def mlp(self, x: Tensor, name: str) -> Tensor:
        inner = self.situ(self.linear(x, f"{name}.gate_proj"), self.linear(x, f"{name}.up_proj"))
        return self.linear(inner, f"{name}.down_proj")

    def situ(self, gate: Tensor, up: Tensor) -> Tensor:
        """Eq. 12."""
        cap, up_cap = self.model.situ.gate_cap, self.model.situ.up_cap
        return cap * torch.tanh(gate / cap) * torch.sigmoid(gate) * up_cap * torch.tanh(up / up_cap)

    def moe(self, x: Tensor, name: str) -> Tensor:
        """Eq. 11-13, expert by expert over all tokens."""
        moe = self.model.moe
        scores = torch.sigmoid(self.linear(x, f"{name}.router"))
        best = (scores + self.weights[f"{name}.router.bias"]).topk(moe.top_k + 1, -1)
        self.margins.append((best.values[:, -2] - best.values[:, -1]).min().item())
        chosen = scores.gather(-1, best.indices[:, :-1])
        weight = torch.zeros_like(scores).scatter(
            -1, best.indices[:, :-1], chosen / chosen.sum(-1, keepdim=True)
        )
        latent, total = self.linear(x, f"{name}.latent_down"), 0
        for e in range(moe.num_experts):
            gate, up, down = (self.weights[f"{name}.experts.{part}"][e] for part in ("gate", "up", "down"))
            total = total + weight[:, e : e + 1] * (self.situ(latent @ gate, latent @ up) @ down)
        routed = self.linear(self.norm(total, f"{name}.latent_norm"), f"{name}.latent_up")
        return routed + self.mlp(x, f"{name}.shared")


def _rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
