"""Taking the state of this moment to the host, planned and ready for any process to write.

megatron-core plans who writes what and copies GPU tensors into pinned host memory; a CPU tensor stays where
it is. Nothing is written here.
"""

from __future__ import annotations

import json
import queue
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from k3train.checkpoint import rng
from k3train.checkpoint.agree import rank
from k3train.checkpoint.state import fetch_optimizer_state, model_state, optimizer_state
from k3train.config.trained import TRAIN_STATE
from k3train.parallel.groups import Groups

INDEX = ".metadata"
"""torch's index of the shards, a pickle; ``k3train.checkpoint.reader`` reads it as data."""

FORMAT_NOTE = "metadata.json"
"""megatron-core's note of the format."""


class _Plan(TorchDistSaveShardedStrategy):
    """megatron-core's strategy up to the point where it would begin to write."""

    writer: FileSystemWriterAsync
    index: Metadata | None

    def __init__(self, fetch: Callable[[], None]) -> None:
        super().__init__()
        self._fetch = fetch

    def async_save(self, *args: Any, **kwargs: Any) -> Any:
        self._fetch()  # by now the main replica of each tensor is on the rank that is to write it
        return super().async_save(*args, **kwargs)

    def _get_save_and_finalize_callbacks(
        self, writer: Any, save_state_dict_ret: Any, async_strategy: Any
    ) -> AsyncRequest:
        self.writer, self.index = writer, save_state_dict_ret[1]
        return AsyncRequest(None, (), [])


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One file of tensors, on the host."""

    name: str
    items: list[tuple[Any, Any]]
    """torch's write items, each with its bytes or its tensor."""
    transforms: Any
    """torch's transforms of the stream; it has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Staged:
    """What this rank has to write."""

    folder: Path
    shards: list[Shard]
    small: dict[str, bytes]
    """Small files, whole."""
    plan: _Plan

    def write_index(self, results: list[list[WriteResult]]) -> list[str]:
        """Write the index of all ranks' shards, and return the names of its files. Only rank 0."""
        assert self.plan.index is not None
        # torch would note a random id and the path of this folder, which will not bear this name for long.
        self.plan.writer.storage_meta = lambda: None
        self.plan.writer.finish(self.plan.index, results)
        save_config(CheckpointingConfig(self.plan.backend, self.plan.version), str(self.folder))
        return [INDEX, FORMAT_NOTE]


def stage(folder: Path, chunks: Sequence[Any], optimizer: Any, groups: Groups, record: bytes) -> Staged:
    """Plan the checkpoint that will lie in ``folder`` and copy this rank's part to the host.

    GPU tensors are copied when this returns, into pinned memory, and training may go on. CPU tensors are not:
    a process that is forked now sees them as they are now, and one that writes here must not train meanwhile.
    ``record`` is the content of TRAIN_STATE. Every rank of the world must call this.
    """
    # megatron-core would start a manager process per rank that imports everything again (seconds), for
    # results that never leave this process.
    filesystem_async._results_queue = queue.Queue()
    # It also warns that its own writer is going away; the other one needs a package this has no use for.
    torch_strategy._logged_mcore_async_deprecation = True
    model = model_state(chunks, groups)
    places = optimizer_state(optimizer, model, loading=False)
    state = {**model, "optimizer": places}
    plan = _Plan(lambda: fetch_optimizer_state(optimizer, places))
    shared: Any = FullyParallelSaveStrategyWrapper(plan, groups.pg.dp_cp)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")  # about its own insides
        dist_checkpointing.save(state, str(folder), shared, async_sharded_save=True, async_strategy="mcore")
    small = {rng_file(rank()): json.dumps(rng.capture()).encode()}
    if rank() == 0:
        small[TRAIN_STATE] = record
    buckets = FileSystemWriterAsync.preload_tensors(plan.writer.write_buckets or [], True)
    return Staged(
        folder=folder,
        shards=[
            Shard(name=name, items=[*data, *tensors], transforms=plan.writer.transforms)
            for _, name, (data, tensors) in buckets
        ],
        small=small,
        plan=plan,
    )


def rng_file(of_rank: int) -> str:
    """Name of the file with one rank's random generators."""
    return f"rng_{of_rank:05d}.json"
