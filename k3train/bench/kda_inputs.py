"""Inputs of Kimi Delta Attention in the regimes where implementations have gone wrong."""

from __future__ import annotations

import torch
from torch import Tensor

REGIMES = {
    "mixed": "decays from none to the bound",
    "saturated": "every channel at the bound",
    "alternating": "channels at the bound beside channels without decay",
    "slow": "hardly any decay, so that states grow",
    "correlated": "keys that share a direction",
    "residual": "values that the state already holds, so that what is written is small",
}
GRADIENTS = ("dq", "dk", "dv", "dz", "dbeta", "dA_log", "ddt_bias")


def kda_inputs(
    regime: str,
    shape: tuple[int, int, int, int],
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int = 0,
) -> list[Tensor]:
    """q, k, v, z [b, t, h, d], beta [b, t, h] in ``dtype``, A_log [h], dt_bias [h * d] fp32: leaves.

    ``shape`` is (b, t, h, d).
    """
    gen = torch.Generator(device=device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device=device, generator=gen)

    b, t, h, d = shape
    q, k, v, z = (normal(b, t, h, d) for _ in range(4))
    beta = normal(b, t, h)
    match regime:
        case "mixed":
            z = z * 3
        case "saturated":
            z = z * 0.3 + 6
        case "alternating":
            z = z * 0.3 + torch.where(torch.arange(d, device=device) % 2 == 0, 7.0, -7.0)
        case "slow" | "residual":
            z = z * 0.5 - 5
    if regime in ("alternating", "slow", "correlated"):
        k = k + 2 * k[:, :1]
    if regime == "residual":  # the same four keys and values again and again, written almost whole
        k, v = (x[:, :4].repeat(1, -(-t // 4), 1, 1)[:, :t] for x in (k, v))
        v = v + 1e-3 * normal(b, t, h, d)
        beta = beta + 3
    a_log, bias = torch.rand(h, device=device, generator=gen) * 0.5, normal(h * d) * 0.1
    return [x.requires_grad_() for x in (*(x.to(dtype) for x in (q, k, v, z, beta)), a_log, bias)]
