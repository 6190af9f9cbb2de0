"""Where documents lie in one micro-batch buffer, as one context-parallel rank sees it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(kw_only=True, slots=True)
class Packing:
    """Document borders of one packed buffer of n tokens; this rank holds the contiguous slice [start, stop).

    Passed through megatron-core's layers in the place of ``packed_seq_params``. Borders stay on the host, so
    that no layer needs a device-to-host copy to plan its work.
    """

    cu_seqlens: tuple[int, ...]
    """Borders in the whole buffer: starts of its segments and, last, n. A padding tail is its own segment."""
    start: int
    """Buffer position of this rank's first token."""
    stop: int
    """Buffer position after this rank's last token."""
    document: Tensor
    """int64 [n], on the device: segment of every token of the whole buffer (not only this rank's)."""
    position: Tensor
    """int64 [stop - start], on the device: tokens of the same segment before each of this rank's tokens."""
    valid: Tensor
    """bool [stop - start], on the device: False on padding, for this rank's tokens."""

    @property
    def local_document(self) -> Tensor:
        """int64 [stop - start]: segment of each of this rank's tokens."""
        return self.document[self.start : self.stop]

    @property
    def local_cu_seqlens(self) -> tuple[int, ...]:
        """Borders inside this rank's slice, counted from its first token: 0 first, its length last."""
        inner = [c - self.start for c in self.cu_seqlens if self.start < c < self.stop]
        return (0, *inner, self.stop - self.start)

    @property
    def continues_from_left(self) -> bool:
        """Whether this rank's first token continues a document that began on an earlier rank."""
        return self.start not in self.cu_seqlens

    @property
    def continues_to_right(self) -> bool:
        """Whether the document of this rank's last token goes on on a later rank."""
        return self.stop not in self.cu_seqlens


def check_packed(x: Tensor, packing: Packing) -> None:
    """Refuse ``x`` [b, t, ...] unless it is the one row of tokens that ``packing`` describes."""
    expected = (1, packing.stop - packing.start)
    if tuple(x.shape[:2]) != expected:
        raise ValueError(
            f"packed documents need {expected} rows and tokens on this rank, got {tuple(x.shape[:2])}"
        )


def make_packing(
    cu_seqlens: tuple[int, ...] | list[int],
    valid: Tensor,
    *,
    rank: int = 0,
    size: int = 1,
    device: torch.device | str = "cpu",
) -> Packing:
    """Describe the slice of context-parallel rank ``rank`` of ``size``.

    ``cu_seqlens`` tiles the whole buffer of n tokens, n divisible by ``size``; ``valid`` is bool [n], on the
    host. Raises ValueError for borders that do not begin at 0 or go back.
    """
    if not len(cu_seqlens) or cu_seqlens[0] != 0 or any(b < a for a, b in pairwise(cu_seqlens)):
        raise ValueError(
            f"cu_seqlens = {_few(cu_seqlens)} must begin with 0 and not go back: it holds where each "
            "document starts and, last, the number of tokens"
        )
    borders = torch.as_tensor(cu_seqlens, dtype=torch.int64)
    n = int(borders[-1])
    share = n // size
    lengths = borders.diff()
    document = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    position = torch.arange(n) - borders[:-1][document]
    start, stop = rank * share, (rank + 1) * share
    return Packing(
        cu_seqlens=tuple(int(c) for c in borders),
        start=start,
        stop=stop,
        document=move(document, device),
        position=move(position[start:stop], device),
        valid=move(valid[start:stop], device),
    )


def _few(numbers: tuple[int, ...] | list[int]) -> str:
    return f"{list(numbers[:8])}"[:-1] + (", ...]" if len(numbers) > 8 else "]")


def move(x: Tensor, device: torch.device | str) -> Tensor:
    """Copy to a device; to a GPU through pinned memory: other memory waits for all work before it."""
    pin = torch.device(device).type == "cuda" and not x.is_cuda
    return (x.pin_memory() if pin else x).to(device, non_blocking=True)
