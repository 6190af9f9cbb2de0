"""Causal softmax attention within the documents of one packed buffer.

Legend: n tokens of the whole buffer, h heads of this rank, d query/key channels, e value channels.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from k3train.kernels.recompute import make_again

SHORT_TOKENS = 512
"""Documents are joined under one block-diagonal mask while they fit in this many tokens together."""
LONG_TOKENS = 4096
"""On a GPU, documents are joined in one variable-length call while they fit in this many tokens together."""


def attention(
    q: Tensor, k: Tensor, v: Tensor, borders: tuple[int, ...], scale: float, *, selective: bool = False
) -> Tensor:
    """Every token attends to itself and to earlier tokens of its document (k3 report eq. 7).

    q, k [n, h, d]; v [n, h, e]; ``borders`` are the documents' starts and, last, n. Returns [n, h, e].
    d and e may differ. Each long document is one fused call. Short ones are joined: bf16 on a GPU takes a
    variable-length flash call for a run of them, everything else a block-diagonal mask. ``selective``: padded
    copies of q, k and v are made again for the backward pass.
    """
    assert borders[0] == 0, borders
    assert borders[-1] == q.shape[0], (borders[-1], q.shape)
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        runs = document_runs(borders, LONG_TOKENS)
        return _by_run(q, k, v, runs, lambda q, k, v, run: _gpu_run(q, k, v, run, scale, selective))
    out = make_again(
        _equal_channels, lambda q, k, v: _cpu_runs(q, k, v, borders, scale), q, k, v, on=selective
    )
    return _first(out, -1, v.shape[-1])


def _cpu_runs(q: Tensor, k: Tensor, v: Tensor, borders: tuple[int, ...], scale: float) -> Tensor:
    def attend(q: Tensor, k: Tensor, v: Tensor, run: tuple[int, ...]) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, h, tokens of the run, d]
        alone = len(run) == 2
        mask = None if alone else causal_mask(tuple(border - run[0] for border in run), q.device)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=alone, scale=scale)
        return o.squeeze(0).transpose(0, 1)

    return _by_run(q, k, v, document_runs(borders, SHORT_TOKENS), attend)


def _by_run(
    q: Tensor, k: Tensor, v: Tensor, runs: tuple[tuple[int, ...], ...], attend: Callable[..., Tensor]
) -> Tensor:
    """``attend`` on each run's rows. They are split, as the gradient of a slice is as large as the whole."""
    if len(runs) == 1:
        return attend(q, k, v, runs[0])
    sizes = [run[-1] - run[0] for run in runs]
    parts = zip(*(x.split(sizes) for x in (q, k, v)), strict=True)
    return torch.cat([attend(*part, run) for part, run in zip(parts, runs, strict=True)])


def _first(x: Tensor, dim: int, size: int) -> Tensor:
    """Nothing is cut where that is all: the gradient of a slice is a copy."""
    return x if x.shape[dim] == size else x.narrow(dim, 0, size)


def _equal_channels(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Some kernels need equal head sizes; zero channels change no score and are cut from the output."""
    widest = max(q.shape[-1], v.shape[-1])
    q, k, v = (x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1])) for x in (q, k, v))
    return q, k, v


def _contiguous_equal(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.contiguous() for x in _equal_channels(q, k, v))
    return q, k, v


def attention_of_ranges(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    borders: tuple[int, ...],
    ranges: Sequence[tuple[int, int]],
    scale: float,
    *,
    selective: bool = False,
) -> Tensor:
    """The rows of ``attention`` at the buffer positions in ``ranges``, ascending.

    q [rows, h, d] are the queries there; k [n, h, d] and v [n, h, e] the whole buffer's keys and values.
    Returns [rows, h, e].
    """
    out = []
    for rows, keys, inner in pieces_of_ranges(borders, tuple(ranges)):
        qkv = q[rows], k[keys], v[keys]
        if inner is None:
            out.append(_rest(*qkv, scale, selective))
        else:
            out.append(attention(*qkv, inner, scale, selective=selective))
    return torch.cat(out)


@lru_cache(maxsize=64)
def pieces_of_ranges(
    borders: tuple[int, ...], ranges: tuple[tuple[int, int], ...]
) -> tuple[tuple[slice, slice, tuple[int, ...] | None], ...]:
    """Queries at ``ranges`` as pieces: rows among them, buffer positions of their keys, borders among these.

    No borders: the rows are the last queries of one document, of which the keys are the beginning.
    """
    pieces: list[tuple[slice, slice, tuple[int, ...] | None]] = []
    done = 0
    for start, stop in ranges:
        document = bisect_right(borders, start) - 1
        first, cut = borders[document], start
        if first < start:
            cut = min(borders[document + 1], stop)
            pieces.append((slice(done, done + cut - start), slice(first, cut), None))
        done += cut - start
        if cut < stop:
            inner = (cut, *(border for border in borders[document + 1 :] if cut < border < stop), stop)
            inner = tuple(border - cut for border in inner)
            pieces.append((slice(done, done + stop - cut), slice(cut, stop), inner))
        done += stop - cut
    return tuple(pieces)


def _rest(q: Tensor, k: Tensor, v: Tensor, scale: float, selective: bool) -> Tensor:
    """The last queries of one document: q [t, h, d] sees keys k [u, h, d], the last of them its own."""
    rows, keys, channels = q.shape[0], k.shape[0], v.shape[-1]
    on_gpu = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)

    def use(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if on_gpu:
            return _varlen(q, k, v, (0, rows), (0, keys), scale)
        seen = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale).squeeze(0).transpose(0, 1)

    return _first(make_again(_contiguous_equal, use, q, k, v, on=selective), -1, channels)


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


def _gpu_run(q: Tensor, k: Tensor, v: Tensor, run: tuple[int, ...], scale: float, selective: bool) -> Tensor:
    if len(run) == 2 and run[1] - run[0] >= LONG_TOKENS // 4:
        n = q.shape[0]
        step = 1 << max(n.bit_length() - 5, 6)
        out = make_again(
            lambda *qkv: tuple(F.pad(x, (0, 0, 0, 0, 0, -n % step)) for x in qkv) if n % step else qkv,
            lambda q, k, v: _long(q, k, v, scale),
            q,
            k,
            v,
            on=selective,
        )
        return _first(out, 0, n)
    borders = tuple(border - run[0] for border in run)
    out = make_again(
        _contiguous_equal,
        lambda q, k, v: _varlen(q, k, v, borders, borders, scale),
        q,
        k,
        v,
        on=selective,
    )
    return _first(out, -1, v.shape[-1])


def _long(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One document by cuDNN, which takes d != e as it is and is twice as fast as flash attention 2 on Hopper.

    It plans anew for every length, so the caller rounds lengths up to one of 16 per octave: later keys are
    hidden from earlier queries, and the added queries are cut off.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    preferred = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(preferred, set_priority=True):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    return out.squeeze(0).transpose(0, 1)


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, borders_q: tuple[int, ...], borders_k: tuple[int, ...], scale: float
) -> Tensor:
    """Where a document has more keys than queries, the last key is the last query's own."""
    from torch.nn.attention.varlen import varlen_attn

    cu_q, cu_k = (_device_borders(borders, q.device) for borders in (borders_q, borders_k))
    longest_q, longest_k = (max(b - a for a, b in pairwise(borders)) for borders in (borders_q, borders_k))
    out = varlen_attn(q, k, v, cu_q, cu_k, longest_q, longest_k, scale=scale, window_size=(-1, 0))
    assert isinstance(out, Tensor)
    return out
