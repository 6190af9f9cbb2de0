"""The largest attention logit of each head, for QK-Clip."""

from __future__ import annotations

import torch
from torch import Tensor

from k3train.kernels.attention import SHORT_TOKENS, causal_mask, document_runs

_BLOCK_ELEMENTS = 2**26
"""Logits held at a time."""


@torch.no_grad()
def max_logits(q: Tensor, k: Tensor, borders: tuple[int, ...], scale: float) -> Tensor:
    """max over queries i and the keys j that they see of scale * q_i k_j, fp32 [h].

    q, k [n, h, d]; ``borders`` are the documents' starts and, last, n. The fused attention kernels do not
    return it, so the products of queries and keys are taken a second time, block by block: about half of
    attention's forward pass again, no memory to speak of.
    """
    heads = q.shape[1]
    best = q.new_full((heads,), float("-inf"), dtype=torch.float32)
    qh, kh = (q * scale).transpose(0, 1), k.permute(1, 2, 0)
    for run in document_runs(borders, SHORT_TOKENS):
        start, stop = run[0], run[-1]
        rows = max(16, _BLOCK_ELEMENTS // (heads * (stop - start)))
        seen = causal_mask(tuple(border - start for border in run), q.device) if len(run) > 2 else None
        for first in range(start, stop, rows):
            last = min(first + rows, stop)
            logits = torch.bmm(qh[:, first:last], kh[:, :, start:last])
            if seen is not None:
                own = seen[first - start : last - start, : last - start]
            else:
                own = logits.new_ones(logits.shape[1:], dtype=torch.bool).tril(first - start)
            logits.masked_fill_(~own, float("-inf"))
            best = torch.maximum(best, logits.amax((1, 2)).float())
    return best
