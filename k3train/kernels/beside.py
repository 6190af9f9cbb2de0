"""Work that has a GPU stream of its own, beside what the caller starts next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def launched_beside(launch: Callable[[], None], device: torch.device, *, on: bool) -> Iterator[None]:
    """Run ``launch()`` first; ``on``: on another CUDA stream, which the current one joins at the end.

    For kernels that autograd knows nothing of. ``launch`` allocates nothing: what its kernels read and write
    comes from the current stream, and is held until the end, after which it may be given back as ever.
    Streams are joined when the body raises, too.
    """
    if not on or device.type != "cuda":
        launch()
        yield
        return
    here, other = torch.cuda.current_stream(device), _stream(device)
    other.wait_stream(here)
    try:
        with torch.cuda.stream(other):
            launch()
        yield
    finally:
        here.wait_stream(other)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
