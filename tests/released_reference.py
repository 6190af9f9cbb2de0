"""Kimi K3's text model over the tensors of a release by their published names, from the formulas alone.

It shares nothing with k3train, not even names: a tensor that a conversion put under a wrong name, transposed
or cut differently gives other logits. float64, one document at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class ReleasedModel:
    """``ReleasedModel(text_config, tensors)(tokens)``: logits of one document, without MTP."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor], mla_eps: float) -> None:
        self.config = config
        self.tensors = {
            name.removeprefix("language_model."): value.double() for name, value in tensors.items()
        }
        self.mla_eps = mla_eps

    def __call__(self, tokens: Tensor) -> Tensor:
        c = self.config
        prefix, bank = self.tensors["model.embed_tokens.weight"][tokens], []
        for layer in range(c["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            h = self.mix([*bank, prefix], f"{name}.self_attention_res") if bank else prefix
            starts = layer % c["attn_res_block_size"] == 0
            if starts:
                bank.append(prefix)
            attend = self.mla if layer + 1 in c["linear_attn_config"]["full_attn_layers"] else self.kda
            a = attend(self.norm(h, f"{name}.input_layernorm"), f"{name}.self_attn")
            prefix = a if starts else prefix + a
            h = self.mix([*bank, prefix], f"{name}.mlp_res")
            h = self.norm(h, f"{name}.post_attention_layernorm")
            dense = layer < c["first_k_dense_replace"]
            prefix = prefix + (
                self.mlp(h, f"{name}.mlp") if dense else self.moe(h, f"{name}.block_sparse_moe")
            )
        out = self.norm(self.mix([*bank, prefix], "model.output_attn_res"), "model.norm")
        return out @ self.tensors["lm_head.weight"].T

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        scale = x.square().mean(-1, keepdim=True) + (self.config["rms_norm_eps"] if eps is None else eps)
        return x * scale.rsqrt() * self.tensors[f"{name}.weight"]

    def mix(self, sources: list[Tensor], name: str) -> Tensor:
        values = torch.stack(sources)
        scores = self.linear(self.norm(values, f"{name}_norm"), f"{name}_proj")
        return (scores.softmax(0) * values).sum(0)

    def situ(self, gate: Tensor, up: Tensor) -> Tensor:
        cap, up_cap = self.config["activation_situ_beta"], self.config["activation_situ_linear_beta"]
        return cap * torch.tanh(gate / cap) * torch.sigmoid(gate) * up_cap * torch.tanh(up / up_cap)

    def mlp(self, x: Tensor, name: str) -> Tensor:
        inner = self.situ(self.linear(x, f"{name}.gate_proj"), self.linear(x, f"{name}.up_proj"))
        return self.linear(inner, f"{name}.down_proj")

    def moe(self, x: Tensor, name: str) -> Tensor:
        c = self.config
        scores = torch.sigmoid(self.linear(x, f"{name}.gate"))
        biased = scores + self.tensors[f"{name}.gate.e_score_correction_bias"]
        chosen = torch.zeros_like(scores).scatter(
            -1, biased.topk(c["num_experts_per_token"], -1).indices, 1.0
        )
        weights = chosen * scores / (chosen * scores).sum(-1, keepdim=True)
        latent, total = self.linear(x, f"{name}.routed_expert_down_proj"), 0
        for e in range(c["num_experts"]):
            expert = f"{name}.experts.{e}"
            inner = self.situ(self.linear(latent, f"{expert}.w1"), self.linear(latent, f"{expert}.w3"))
            total = total + weights[:, e : e + 1] * self.linear(inner, f"{expert}.w2")
        routed = self.norm(total, f"{name}.routed_expert_norm")
        return self.linear(routed, f"{name}.routed_expert_up_proj") + self.mlp(x, f"{name}.shared_experts")

    def mla(self, x: Tensor, name: str) -> Tensor:
        c, t = self.config, len(x)
        heads, nope, shared = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        q = self.norm(self.linear(x, f"{name}.q_a_proj"), f"{name}.q_a_layernorm", self.mla_eps)
        q = self.linear(q, f"{name}.q_b_proj").view(t, heads, nope + shared)
        latent, k_shared = self.linear(x, f"{name}.kv_a_proj_with_mqa").split([c["kv_lora_rank"], shared], -1)
        kv = self.linear(self.norm(latent, f"{name}.kv_a_layernorm", self.mla_eps), f"{name}.kv_b_proj")
        k, v = kv.view(t, heads, -1).split([nope, c["v_head_dim"]], -1)
        k = torch.cat([k, k_shared[:, None].expand(t, heads, shared)], -1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * (nope + shared) ** -0.5
        scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -torch.inf)
        out = torch.einsum("hqk,khe->qhe", scores.softmax(-1), v).flatten(1)
        return self.linear(out * torch.sigmoid(self.linear(x, f"{name}.g_proj")), f"{name}.o_proj")

    def kda(self, x: Tensor, name: str) -> Tensor:
        c, t = self.config["linear_attn_config"], len(x)
        heads, d = c["num_heads"], c["head_dim"]

        def conv(part: str) -> Tensor:
            taps = self.tensors[f"{name}.{part}_conv1d.weight"]
            y = F.pad(self.linear(x, f"{name}.{part}_proj").T[None], (taps.shape[-1] - 1, 0))
            return F.silu(F.conv1d(y, taps, groups=len(taps))[0].T).view(t, heads, d)

        q, k, v = (conv(part) for part in "qkv")
        q, k = (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for y in (q, k))
        beta = torch.sigmoid(self.linear(x, f"{name}.b_proj"))
        z = (
            self.linear(self.linear(x, f"{name}.f_a_proj"), f"{name}.f_b_proj")
            + self.tensors[f"{name}.dt_bias"]
        )
        rate = self.tensors[f"{name}.A_log"][:heads].exp()[:, None]
        decay = torch.exp(c["gate_lower_bound"] * torch.sigmoid(rate * z.view(t, heads, d)))
        state, out = x.new_zeros(heads, d, d), []
        for i in range(t):
            state = state * decay[i, :, :, None]
            error = beta[i, :, None] * (v[i] - torch.einsum("hk,hkv->hv", k[i], state))
            state = state + torch.einsum("hk,hv->hkv", k[i], error)
            out.append(torch.einsum("hk,hkv->hv", q[i] * d**-0.5, state))
        o = self.norm(torch.stack(out), f"{name}.o_norm") * torch.sigmoid(
            self.linear(x, f"{name}.g_proj").view(t, heads, d)
        )
        return self.linear(o.flatten(1), f"{name}.o_proj")
