"""The MoE layer as plain formulas over all experts, from the parameters of a ``LatentMoe`` on one rank."""

import torch
import torch.nn.functional as F

from k3train.config.schema import RouterInput


def situ(gate, up, caps):
    a, b = caps
    return a * torch.tanh(gate / a) * torch.sigmoid(gate) * b * torch.tanh(up / b)


def dense_moe(p, x, k3, experts=None):
    """Every expert on every token, in the dtype of ``p``: a dict of tensors named as in the layer's state.

    ``experts`` [n, k] pins the routes. x [n, hidden] -> [n, hidden].
    """
    caps, top_k = (k3.situ.gate_cap, k3.situ.up_cap), k3.moe.top_k
    z = x @ p["latent_down.weight"].T
    latent = k3.moe.router.input is RouterInput.latent
    scores = torch.sigmoid((z if latent else x) @ p["router.weight"].T)
    if experts is None:
        experts = (scores + p["router.bias"]).topk(top_k, dim=1).indices
    chosen = torch.zeros_like(scores).scatter(1, experts, 1.0)
    weights = chosen * scores / ((chosen * scores).sum(1, keepdim=True) + 1e-20)
    gate = torch.einsum("nl,elf->enf", z, p["experts.gate"])
    up = torch.einsum("nl,elf->enf", z, p["experts.up"])
    each = torch.einsum("enf,efl->enl", situ(gate, up, caps), p["experts.down"])
    u = torch.einsum("ne,enl->nl", weights, each)
    if k3.moe.latent_norm:
        u = u * torch.rsqrt(u.square().mean(1, keepdim=True) + k3.norm_eps) * p["latent_norm.weight"]
    y = u @ p["latent_up.weight"].T
    if k3.moe.num_shared_experts:
        g, h = (F.linear(x, p[f"shared.{name}_proj.weight"]) for name in ("gate", "up"))
        y = y + F.linear(situ(g, h, caps), p["shared.down_proj.weight"])
    return y
