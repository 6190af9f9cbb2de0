"""The largest attention logit of each head, for QK-Clip."""

from __future__ import annotations

import torch
from torch import Tensor

from k3train.kernels.attention import SHORT_TOKENS, causal_mask, document_runs, pieces_of_ranges

_BLOCK_ELEMENTS = 2**26
"""Logits held at a time."""


@torch.no_grad()
def max_logits(q: Tensor, k: Tensor, borders: tuple[int, ...], scale: float) -> Tensor:
    """max over queries i and the keys j that they see of scale * q_i k_j, fp32 [h].

    q, k [n, h, d]; ``borders`` are the documents' starts and, last, n. The fused attention kernels do not
    return it, so the products of queries and keys are taken a second time, block by block: about half of
    attention's forward pass again, no memory to speak of.
    """
    best = q.new_full((q.shape[1],), float("-inf"), dtype=torch.float32)
    for run in document_runs(borders, SHORT_TOKENS):
        cut = slice(run[0], run[-1])
        seen = causal_mask(tuple(border - run[0] for border in run), q.device) if len(run) > 2 else None
        best = torch.maximum(best, _largest(q[cut] * scale, k[cut], seen))
    return best


@torch.no_grad()
def max_logits_of_ranges(
    q: Tensor, k: Tensor, borders: tuple[int, ...], ranges: tuple[tuple[int, int], ...], scale: float
) -> Tensor:
    """The same over the queries at the buffer positions in ``ranges``: q [rows, h, d], result fp32 [h]."""
    best = q.new_full((q.shape[1],), float("-inf"), dtype=torch.float32)
    for rows, keys, inner in pieces_of_ranges(borders, ranges):
        if inner is None:
            found = _largest(q[rows] * scale, k[keys], None)
        else:
            found = max_logits(q[rows], k[keys], inner, scale)
        best = torch.maximum(best, found)
    return best


def _largest(q: Tensor, k: Tensor, seen: Tensor | None) -> Tensor:
    """q [t, h, d] are the last of the tokens of k [u, h, d]; ``seen`` bool [t, t] if they are documents."""
    heads, own, before = q.shape[1], q.shape[0], k.shape[0] - q.shape[0]
    best = q.new_full((heads,), float("-inf"), dtype=torch.float32)
    qh, kh = q.transpose(0, 1), k.permute(1, 2, 0)
    rows = max(16, _BLOCK_ELEMENTS // (heads * k.shape[0]))
    for first in range(0, own, rows):
        last = min(first + rows, own)
        logits = torch.bmm(qh[:, first:last], kh[:, :, : before + last])
        if seen is not None:
            visible = seen[first:last, :last]
        else:
            visible = logits.new_ones(logits.shape[1:], dtype=torch.bool).tril(before + first)
        logits.masked_fill_(~visible, float("-inf"))
        best = torch.maximum(best, logits.amax((1, 2)).float())
    return best
