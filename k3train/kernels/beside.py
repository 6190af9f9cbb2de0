"""Work that has a GPU stream of its own, beside the collectives that the caller starts next."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor


def beside(function: Callable[[Tensor], Tensor], x: Tensor, *, on: bool) -> Callable[[], Tensor]:
    """Start ``function(x)``; what is returned waits for its result, for one call.

    ``on``: on another CUDA stream, so that it overlaps with what the caller does until it asks; so does its
    backward pass, which autograd runs on the same stream. Otherwise it runs when the caller asks.
    """
    if not on:
        return lambda: function(x)
    here, other = torch.cuda.current_stream(x.device), _stream(x.device)
    other.wait_stream(here)
    x.record_stream(other)  # its memory must not be given away while the other stream reads it
    with torch.cuda.stream(other):
        out = function(x)

    def result() -> Tensor:
        here.wait_stream(other)
        out.record_stream(here)
        return out

    return result


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
