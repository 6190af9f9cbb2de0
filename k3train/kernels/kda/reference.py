"""Kimi Delta Attention, token by token: the definition against which every faster path is tested."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

L2_EPS = 1e-6
"""Added to the squared length of q and k before the root."""


def bounded_gate(z: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """Log-decay per token and key channel: lower_bound * sigmoid(exp(A) * (z + dt_bias)), k3 report eq. 5-6.

    ``z`` [..., heads, channels], ``A_log`` [heads], ``dt_bias`` [heads * channels]; the result has the shape
    of ``z``, lies in [lower_bound, 0] and is fp32 (fp64 for fp64 input).
    """
    dtype = state_dtype(z)
    heads, channels = z.shape[-2:]
    slope = A_log.to(dtype).exp()[:, None]
    return lower_bound * torch.sigmoid(slope * (z.to(dtype) + dt_bias.to(dtype).view(heads, channels)))


def l2_normalise(x: Tensor) -> Tensor:
    """``x`` over its Euclidean length along the last dim; zero stays zero."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def state_dtype(x: Tensor) -> torch.dtype:
    """dtype of states and gates for input ``x``: fp32, or fp64 when ``x`` is."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def kda_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    gate_lower_bound: float,
    cu_seqlens: Sequence[int] | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = (I - beta k k^T) diag(e^g) S_{t-1} + beta k v^T;  o_t = S_t^T q / sqrt(d)  (k3 report eq. 1-2).

    q, k, v, z [b, t, h, d] and beta [b, t, h] are what ``choose.kda`` takes. ``cu_seqlens`` (with b = 1) cuts
    the tokens into documents, each with a state of its own; without it every row is one document. States are
    [documents, h, d, d], key channel before value channel. Returns (o [b, t, h, d] in the dtype of ``v``,
    final states). Differentiable by autograd; memory and time grow with t, so for tests.
    """
    dtype = state_dtype(q)
    borders = list(cu_seqlens) if cu_seqlens is not None else [0, q.shape[1]]
    g = bounded_gate(z, A_log, dt_bias, gate_lower_bound)
    b = torch.sigmoid(beta.to(dtype))
    qn = l2_normalise(q.to(dtype)) * q.shape[-1] ** -0.5
    kn, vs = l2_normalise(k.to(dtype)), v.to(dtype)
    rows = q.shape[0]
    outputs, finals = [], []
    for i, (start, stop) in enumerate(pairwise(borders)):
        if initial_state is None:
            S = vs.new_zeros(rows, q.shape[2], q.shape[3], v.shape[3])
        else:
            S = initial_state.to(dtype)[i * rows : (i + 1) * rows]
        for t in range(start, stop):
            S = S * g[:, t].exp()[..., None]
            error = vs[:, t] - torch.einsum("bhk,bhkv->bhv", kn[:, t], S)
            S = S + torch.einsum("bhk,bhv->bhkv", kn[:, t] * b[:, t, :, None], error)
            outputs.append(torch.einsum("bhk,bhkv->bhv", qn[:, t], S))
        finals.append(S)
    return torch.stack(outputs, 1).to(v.dtype), torch.cat(finals)
