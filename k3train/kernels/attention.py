"""Causal softmax attention within the documents of one packed buffer.

Legend: n tokens of the whole buffer, h heads of this rank, d query/key channels, e value channels.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

SHORT_TOKENS = 512
"""Documents are joined under one block-diagonal mask while they fit in this many tokens together."""


def attention(q: Tensor, k: Tensor, v: Tensor, borders: tuple[int, ...], scale: float) -> Tensor:
    """Every token attends to itself and to earlier tokens of its document (k3 report eq. 7).

    q, k [n, h, d]; v [n, h, e]; ``borders`` are the documents' starts and, last, n. Returns [n, h, e].
    d and e may differ. bf16 on a GPU takes one variable-length flash call for all documents; everything else
    takes scaled-dot-product attention on runs of short documents and on each long one.
    """
    assert borders[0] == 0, borders
    assert borders[-1] == q.shape[0], (borders[-1], q.shape)
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        return _varlen(q, k, v, borders, scale)
    # Fused CPU kernels need equal head sizes; zero channels change no score and are cut from the output.
    d, e = q.shape[-1], v.shape[-1]
    q, k, v = (F.pad(x, (0, max(d, e) - x.shape[-1])) for x in (q, k, v))
    out = []
    for run in _runs(borders):
        # Each part is [1, h, tokens of the run, d].
        qr, kr, vr = (x[run[0] : run[-1]].transpose(0, 1)[None] for x in (q, k, v))
        alone = len(run) == 2
        mask = None if alone else _block_mask(tuple(border - run[0] for border in run), q.device)
        o = F.scaled_dot_product_attention(qr, kr, vr, attn_mask=mask, is_causal=alone, scale=scale)
        out.append(o[0].transpose(0, 1))
    return torch.cat(out)[..., :e]


def attention_reference(q: Tensor, k: Tensor, v: Tensor, borders: tuple[int, ...], scale: float) -> Tensor:
    """The same as ``attention`` by one masked dense softmax in fp32 or better: memory n * n * h."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    mask = _block_mask(borders, q.device)
    scores = torch.einsum("qhd,khd->hqk", q.to(dtype), k.to(dtype)) * scale
    p = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khe->qhe", p, v.to(dtype)).to(q.dtype)


@lru_cache(maxsize=64)
def _runs(borders: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Borders of each run of documents: consecutive short ones joined, long ones alone."""
    runs: list[list[int]] = []
    for start, stop in pairwise(borders):
        if runs and stop - runs[-1][0] <= SHORT_TOKENS:
            runs[-1].append(stop)
        else:
            runs.append([start, stop])
    return tuple(tuple(run) for run in runs)


def _block_mask(borders: tuple[int, ...], device: torch.device) -> Tensor:
    """bool [t, t]: True where the query (row) may see the key (column)."""
    lengths = torch.tensor(borders, device=device).diff()
    document = torch.repeat_interleave(lengths, output_size=borders[-1])
    return (document[:, None] == document[None, :]).tril()


@lru_cache(maxsize=64)
def _device_borders(borders: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(borders, dtype=torch.int32).pin_memory().to(device, non_blocking=True)


def _varlen(q: Tensor, k: Tensor, v: Tensor, borders: tuple[int, ...], scale: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    d, e = q.shape[-1], v.shape[-1]
    q, k, v = (F.pad(x, (0, max(d, e) - x.shape[-1])).contiguous() for x in (q, k, v))
    cu = _device_borders(borders, q.device)
    longest = max(b - a for a, b in pairwise(borders))
    out = varlen_attn(q, k, v, cu, cu, longest, longest, scale=scale, window_size=(-1, 0))
    assert isinstance(out, Tensor)
    return out[..., :e]
