"""Writing safetensors shards one tensor at a time.

The library's own writer wants all tensors of a shard in memory; a shard of one K3 layer would be 59 GB. The
format is a length, a JSON header and the bytes, so here the header, which needs shapes alone, goes first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from k3train.checkpoint.hf.names import Shape
from k3train.checkpoint.hf.release import INDEX

DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.uint8: "U8"}
"""safetensors' words for the dtypes of a release."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One tensor that an export will write."""

    name: str
    dtype: torch.dtype
    shape: Shape

    @property
    def size_bytes(self) -> int:
        """Bytes of the values."""
        return prod(self.shape) * self.dtype.itemsize


def plan_shards(tensors: Sequence[Planned], shard_bytes: int) -> list[list[Planned]]:
    """Consecutive tensors in shards of at most ``shard_bytes``, or of one tensor that is larger.

    Within a shard wider dtypes come first, which keeps every tensor aligned to its own items.
    """
    shards: list[list[Planned]] = []
    room = 0
    for tensor in tensors:
        if not shards or tensor.size_bytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= tensor.size_bytes
    return [sorted(shard, key=lambda tensor: -tensor.dtype.itemsize) for shard in shards]


def write_shards(
    folder: Path, shards: Sequence[Sequence[Planned]], values: Callable[[Planned], Tensor]
) -> None:
    """Write every shard and the index into ``folder``; ``values`` is asked for one tensor at a time.

    File names and bytes depend on names, shapes and values alone.
    """
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / file, shard, values)
        weight_map |= {tensor.name: file for tensor in shard}
    total = sum(tensor.size_bytes for shard in shards for tensor in shard)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_shard(path: Path, shard: Sequence[Planned], values: Callable[[Planned], Tensor]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in shard:
        span = [offset, offset := offset + tensor.size_bytes]
        header[tensor.name] = {
            "dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span,
        }  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in shard:
            # Nothing here keeps one value, which may be part of a stack, while the next is read.
            file.write(_bytes(tensor, values(tensor)))
        file.flush()
        os.fsync(file.fileno())


def _bytes(tensor: Planned, value: Tensor) -> memoryview:
    assert (value.dtype, tuple(value.shape)) == (tensor.dtype, tensor.shape), tensor.name
    return value.contiguous().view(-1).view(torch.uint8).numpy().data
