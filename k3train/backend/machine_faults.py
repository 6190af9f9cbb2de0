"""Which errors are the machine's: of memory, a device or a connection."""

from __future__ import annotations

import errno

import torch
import torch.distributed as dist

_CLASSES = (torch.OutOfMemoryError, torch.AcceleratorError, MemoryError, dist.DistError)
_WORDS = (
    "CUDA",
    "NCCL",
    "gloo",
    "out of memory",
    "allocate memory",
    "bad_alloc",
    "new thread",
    "onnection",
    "imed out",
)
"""In messages of errors that torch gives no class of their own."""
_NUMBERS = (errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.EREMOTEIO, errno.ENOMEM, errno.EAGAIN)
"""Of files that a server or the kernel could not give at the moment. EIO is left out: a disk says it of what
is lost."""


def is_machine_fault(error: BaseException) -> bool:
    """Whether memory, a device or a connection failed, which another start may be spared."""
    if isinstance(error, OSError) and error.errno in _NUMBERS:
        return True
    return isinstance(error, _CLASSES) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)
    )
