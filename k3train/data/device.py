"""Move one rank's share of a micro-batch to its device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from k3train.data.batch import MicroBatch
from k3train.kernels.packing import Packing, make_packing, move


@dataclass(kw_only=True, slots=True)
class RankBatch:
    """One context-parallel rank's slice of a micro-batch, as ``K3Model.forward`` takes it."""

    tokens: Tensor
    """int64 [1, n / cp]."""
    labels: Tensor
    """int64 [1, n / cp]: next token, or -100."""
    labels_mtp: Tensor
    """int64 [1, n / cp]: token after next, or -100."""
    packing: Packing
    """Borders of the whole buffer, and which slice of it this is."""


def to_device(
    batch: MicroBatch, *, cp_rank: int = 0, cp_size: int = 1, device: torch.device | str = "cpu"
) -> RankBatch:
    """The contiguous slice of context-parallel rank ``cp_rank``; n must divide by ``cp_size``.

    Copies to a GPU go through pinned memory and do not wait.
    """
    n = len(batch.tokens)
    if n % cp_size:
        raise ValueError(f"a micro-batch of {n} tokens does not divide over cp={cp_size} ranks.")
    share = slice(cp_rank * n // cp_size, (cp_rank + 1) * n // cp_size)

    def own(array: np.ndarray) -> Tensor:
        return move(torch.from_numpy(array[share].astype(np.int64))[None], device)

    return RankBatch(
        tokens=own(batch.tokens),
        labels=own(batch.labels),
        labels_mtp=own(batch.labels_mtp),
        packing=make_packing(
            batch.cu_seqlens.tolist(),
            torch.from_numpy(batch.valid),
            rank=cp_rank,
            size=cp_size,
            device=device,
        ),
    )
