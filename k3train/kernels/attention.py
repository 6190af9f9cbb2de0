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
LONG_TOKENS = 4096
"""On a GPU, documents are joined in one variable-length call while they fit in this many tokens together."""


def attention(q: Tensor, k: Tensor, v: Tensor, borders: tuple[int, ...], scale: float) -> Tensor:
    """Every token attends to itself and to earlier tokens of its document (k3 report eq. 7).

    q, k [n, h, d]; v [n, h, e]; ``borders`` are the documents' starts and, last, n. Returns [n, h, e].
    d and e may differ. Each long document is one fused call. Short ones are joined: bf16 on a GPU takes a
    variable-length flash call for a run of them, everything else a block-diagonal mask.
    """
    assert borders[0] == 0, borders
    assert borders[-1] == q.shape[0], (borders[-1], q.shape)
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        runs = document_runs(borders, LONG_TOKENS)
        cuts = [slice(run[0], run[-1]) for run in runs]
        out = [_gpu_run(q[cut], k[cut], v[cut], run, scale) for cut, run in zip(cuts, runs, strict=True)]
        return out[0] if len(out) == 1 else torch.cat(out)
    # Fused CPU kernels need equal head sizes; zero channels change no score and are cut from the output.
    d, e = q.shape[-1], v.shape[-1]
    q, k, v = (F.pad(x, (0, max(d, e) - x.shape[-1])) for x in (q, k, v))
    out = []
    for run in document_runs(borders, SHORT_TOKENS):
        # Each part is [1, h, tokens of the run, d].
        qr, kr, vr = (x[run[0] : run[-1]].transpose(0, 1)[None] for x in (q, k, v))
        alone = len(run) == 2
        mask = None if alone else causal_mask(tuple(border - run[0] for border in run), q.device)
        o = F.scaled_dot_product_attention(qr, kr, vr, attn_mask=mask, is_causal=alone, scale=scale)
        out.append(o[0].transpose(0, 1))
    return torch.cat(out)[..., :e]


def attention_reference(q: Tensor, k: Tensor, v: Tensor, borders: tuple[int, ...], scale: float) -> Tensor:
    """The same as ``attention`` by one masked dense softmax in fp32 or better: memory n * n * h."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    mask = causal_mask(borders, q.device)
    scores = torch.einsum("qhd,khd->hqk", q.to(dtype), k.to(dtype)) * scale
    p = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khe->qhe", p, v.to(dtype)).to(q.dtype)


@lru_cache(maxsize=64)
def document_runs(borders: tuple[int, ...], short: int) -> tuple[tuple[int, ...], ...]:
    """Borders of each run: consecutive documents joined up to ``short`` tokens, longer ones alone."""
    runs: list[list[int]] = []
    for start, stop in pairwise(borders):
        if runs and stop - runs[-1][0] <= short:
            runs[-1].append(stop)
        else:
            runs.append([start, stop])
    return tuple(tuple(run) for run in runs)


def causal_mask(borders: tuple[int, ...], device: torch.device) -> Tensor:
    """bool [t, t]: True where the query (row) may see the key (column)."""
    lengths = torch.tensor(borders, device=device).diff()
    document = torch.repeat_interleave(lengths, output_size=borders[-1])
    return (document[:, None] == document[None, :]).tril()


@lru_cache(maxsize=64)
def _device_borders(borders: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(borders, dtype=torch.int32).pin_memory().to(device, non_blocking=True)


def _gpu_run(q: Tensor, k: Tensor, v: Tensor, run: tuple[int, ...], scale: float) -> Tensor:
    if len(run) == 2 and run[1] - run[0] >= LONG_TOKENS // 4:
        return _long(q, k, v, scale)
    return _varlen(q, k, v, tuple(border - run[0] for border in run), scale)


def _long(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One document by cuDNN, which takes d != e as it is and is twice as fast as flash attention 2 on Hopper.

    It plans anew for every length, so lengths are rounded up to one of 16 per octave: later keys are hidden
    from earlier queries, and the added queries are cut off.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    n = q.shape[0]
    step = 1 << max(n.bit_length() - 5, 6)
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, -n % step)).transpose(0, 1)[None] for x in (q, k, v))
    preferred = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(preferred, set_priority=True):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    return out[0].transpose(0, 1)[:n]


def _varlen(q: Tensor, k: Tensor, v: Tensor, borders: tuple[int, ...], scale: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    d, e = q.shape[-1], v.shape[-1]
    q, k, v = (F.pad(x, (0, max(d, e) - x.shape[-1])).contiguous() for x in (q, k, v))
    cu = _device_borders(borders, q.device)
    longest = max(b - a for a, b in pairwise(borders))
    out = varlen_attn(q, k, v, cu, cu, longest, longest, scale=scale, window_size=(-1, 0))
    assert isinstance(out, Tensor)
    return out[..., :e]
