"""Builds the pipeline chunks that one rank holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from k3train.config import schema
from k3train.model.config import K3Config
from k3train.model.model import K3Model
from k3train.model.payload import BlockCache
from k3train.parallel.groups import Groups
from k3train.parallel.layout import Layout


def build_model(
    model: schema.Model, config: K3Config, layout: Layout, groups: Groups, device: torch.device
) -> list[K3Model]:
    """This rank's chunks, in pipeline order, initialised and on ``device``; every rank must call this.

    On the meta device parameters have shapes and dtypes but no storage, which suits counting.
    """
    assert config.k3 is model
    cache = BlockCache(layout.vp)
    with _Allocate(device):
        chunks = [K3Model(config, layout, chunk, cache, groups.pg) for chunk in range(layout.vp)]
    if chunks[0].share_embeddings_and_output_weights:
        _share_embedding(chunks, layout, groups, device)
    return chunks


def _share_embedding(chunks: list[K3Model], layout: Layout, groups: Groups, device: torch.device) -> None:
    """Start the last pipeline rank's copy of the embedding equal to the first's, and mark both as one."""
    for chunk in chunks:
        if not hasattr(chunk, "embedding"):
            continue
        weight: Any = chunk.embedding.weight
        # A bucket of its own on both ranks, so that the distributed optimizer cuts it at the same places.
        weight.shared_embedding = True
        if not chunk.pre_process:
            weight.shared = True  # counted once in the gradient norm
        if device.type != "meta":
            dist.broadcast(
                weight.data, src=dist.get_process_group_ranks(groups.pg.embd)[0], group=groups.pg.embd
            )


_FACTORIES = frozenset({"empty", "zeros", "ones", "full", "tensor", "rand", "randn", "arange"})


class _Allocate(TorchFunctionMode):
    """Sends every new tensor to one device, whatever device the module that makes it names."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # By name, since the CPU bridge puts wrappers in the place of these functions.
        if getattr(func, "__name__", "") in _FACTORIES:
            kwargs["device"] = self.device
        return func(*args, **kwargs)
