"""Digests of tensors: equal for equal bits, and different after any single bit flips."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_ROW = 4096
"""Elements that are folded into one word at a time."""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def digests(tensors: Iterable[Tensor]) -> list[int]:
    """One 64-bit number for each tensor, made on its device and fetched together with that device's others.

    Rows of bits are folded by exclusive or, and the rows are summed with odd weights, so that neither one
    changed bit nor two rows that changed places go unseen. It guards against faults, not against people.
    """
    each = [_digest(tensor) for tensor in tensors]
    found: dict[int, int] = {}
    for device in {value.device for value in each}:
        here = [i for i, value in enumerate(each) if value.device == device]
        found.update(zip(here, torch.stack([each[i] for i in here]).tolist(), strict=True))
    return [found[i] for i in range(len(each))]


def digest(tensors: Iterable[Tensor]) -> int:
    """One number for several tensors in their order."""
    return hash(tuple(digests(tensors)))


def _digest(tensor: Tensor) -> Tensor:
    words = tensor.detach().contiguous().view(-1).view(_WORDS[tensor.element_size()])
    whole = words.numel() // _ROW * _ROW
    rows = [torch.hash_tensor(words[:whole].view(-1, _ROW), 1)] if whole else []
    if whole < words.numel():
        rows.append(torch.hash_tensor(words[whole:]).view(1))
    if not rows:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    folded = torch.cat([row.view(torch.int64) for row in rows])
    weights = torch.arange(1, 2 * len(folded), 2, device=tensor.device)
    return (folded * weights).sum()
