"""Shuffling by keyed hash: the same on every machine and for every numpy version."""

from __future__ import annotations

import hashlib

import numpy as np


def key_of(*parts: object) -> int:
    """64-bit key of a list of plain values."""
    digest = hashlib.sha256("\x1f".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "little")


def keyed_hash(values: np.ndarray, key: int) -> np.ndarray:
    """uint64 hash of each non-negative integer under ``key`` (the finaliser of splitmix64)."""
    x = values.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def shuffled(values: np.ndarray, key: int) -> np.ndarray:
    """The values, sorted by their hash under ``key``."""
    return values[np.argsort(keyed_hash(values, key), kind="stable")]
