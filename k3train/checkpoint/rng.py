"""State of every random generator of a rank, as JSON."""

from __future__ import annotations

import base64
import hashlib
import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, get_cuda_rng_tracker


def capture() -> dict[str, Any]:
    """State of Python's, numpy's, torch's and megatron-core's generators on this rank, fit for JSON."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(internal), gauss],
        "numpy": [str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": _pack(torch.get_rng_state()),
        "cuda": _pack(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
        "megatron": {key: _pack(state) for key, state in _tracker().get_states().items()},
    }


def restore(state: dict[str, Any]) -> None:
    """Continue from a captured state."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_unpack(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_unpack(state["cuda"]))
    _tracker().set_states({key: _unpack(each) for key, each in state["megatron"].items()})


def reseed(key: str) -> None:
    """Seed every generator of this rank afresh from ``key``: the same key gives the same streams.

    megatron-core's named streams keep their structure: each is seeded from its own current state and the key,
    so ranks that shared a stream still share it and ranks that did not still do not.
    """
    seed = _seed(key.encode())
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)
    tracker = _tracker()
    states = {}
    for name, state in sorted(tracker.get_states().items()):
        generator = torch.Generator(device="cuda" if torch.cuda.is_available() else "cpu")
        generator.manual_seed(_seed(key.encode() + name.encode() + bytes(state.cpu().numpy())))
        states[name] = generator.get_state()
    tracker.set_states(states)


def _tracker() -> CudaRNGStatesTracker:
    tracker = get_cuda_rng_tracker()
    assert tracker is not None
    return tracker


def _seed(material: bytes) -> int:
    return int.from_bytes(hashlib.sha256(material).digest()[:7], "little")


def _pack(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _unpack(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
