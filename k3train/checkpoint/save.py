"""Writing a checkpoint: a folder appears under its final name complete, or not at all."""

from __future__ import annotations

import functools
import json
import os
import queue
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.filesystem import _write_item as torch_write_item

from k3train.checkpoint import rng
from k3train.checkpoint.agree import every_rank, on_first_rank, rank
from k3train.checkpoint.folder import LATEST, prune, scratch_name, step_name, verify
from k3train.checkpoint.manifest import (
    CheckpointError,
    CheckpointNotWritten,
    FileEntry,
    Manifest,
    check_sizes,
    digest_file,
    read_manifest,
    sync_folder,
    write_durably,
    write_manifest,
)
from k3train.checkpoint.state import layout_identity, model_state, optimizer_state
from k3train.faults import point
from k3train.optim.build import allocate_state, optimizer_steps
from k3train.parallel.groups import Groups

TRAIN_STATE = "train_state.json"
"""What is not a tensor: the caller's train state, the layout, optimizer steps, versions."""


def save_checkpoint(
    directory: Path,
    *,
    chunks: Sequence[Any],
    optimizer: Any,
    train_state: dict[str, Any],
    groups: Groups,
    keep: int,
    milestone: bool = False,
) -> Path:
    """Write the checkpoint of ``train_state["step"]`` into ``directory`` and return its folder.

    ``train_state`` is JSON data: step, tokens, stage, data position, fingerprint, whatever the caller needs
    to continue. The folder is written under a temporary name, every file is read back and digested by the
    rank that wrote it, and only then renamed; afterwards all but the newest ``keep`` complete checkpoints and
    the milestones are deleted. When a good checkpoint of the same state exists, nothing is written again.
    Raises CheckpointNotWritten on every rank when any rank fails; older checkpoints are then untouched.
    Every rank of the world must call this.
    """
    point("ckpt.begin")
    step = train_state["step"]
    final = directory / step_name(step)
    allocate_state(optimizer)
    record = json.dumps(_record(optimizer, train_state, groups), sort_keys=True, indent=1).encode()
    if _saved_before(final, record, milestone):
        return final
    scratch = on_first_rank(lambda: _new_scratch(directory, step))
    try:
        every_rank(lambda: _write_tensors(scratch, chunks, optimizer, groups))
        entries: dict[str, FileEntry] = {}
        for own in every_rank(lambda: _finish_own_files(scratch, record)):
            entries.update(own)
        manifest = Manifest(step=step, milestone=milestone, files=entries)
        on_first_rank(lambda: _commit(scratch, final, manifest))
    except CheckpointError as error:
        on_first_rank(lambda: shutil.rmtree(scratch, ignore_errors=True))
        free = shutil.disk_usage(directory).free
        raise CheckpointNotWritten(
            f"checkpoint {final.name} was not written: {error} "
            f"({free / 2**30:.2f} GiB are free in {directory}; older checkpoints are untouched)"
        ) from error
    point("ckpt.prune")
    on_first_rank(lambda: prune(directory, keep=keep))
    return final


def _record(optimizer: Any, train_state: dict[str, Any], groups: Groups) -> dict[str, Any]:
    return {
        "train": train_state,
        "optimizer_steps": max(every_rank(lambda: optimizer_steps(optimizer))),
        "layout": layout_identity(groups),
        "versions": {name: version(name) for name in ("torch", "megatron-core", "numpy")},
    }


def _saved_before(final: Path, record: bytes, milestone: bool) -> bool:
    """Whether a good checkpoint of exactly this state exists; it becomes a milestone if this one is."""

    def same_state() -> bool:
        path = final / TRAIN_STATE
        return path.is_file() and path.read_bytes() == record

    if not on_first_rank(same_state):
        return False
    try:
        verify(final)
    except CheckpointError:
        return False

    def mark() -> None:
        manifest = read_manifest(final)
        if milestone and not manifest.milestone:
            write_manifest(final, replace(manifest, milestone=True))

    on_first_rank(mark)
    return True


def _new_scratch(directory: Path, step: int) -> Path:
    scratch = directory / scratch_name(step, "tmp")
    scratch.mkdir(parents=True)
    return scratch


def _write_tensors(scratch: Path, chunks: Sequence[Any], optimizer: Any, groups: Groups) -> None:
    # megatron-core would start a manager process per rank that imports everything again (seconds), only to
    # hand results back within this process.
    filesystem_async._results_queue = queue.Queue()
    # It also warns that its own writer is going away; the other one needs a package this has no use for.
    torch_strategy._logged_mcore_async_deprecation = True
    filesystem_async._write_item = _write_item
    model = model_state(chunks, groups)
    state = {**model, "optimizer": optimizer_state(optimizer, model, groups, loading=False)}
    strategy: Any = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), groups.pg.dp_cp)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")  # about its own insides
        dist_checkpointing.save(state, str(scratch), strategy)


@functools.wraps(torch_write_item)  # megatron-core looks at its signature
def _write_item(*arguments: Any, **options: Any) -> Any:
    point("ckpt.shard")
    return torch_write_item(*arguments, **options)


def _finish_own_files(scratch: Path, record: bytes) -> dict[str, FileEntry]:
    """Write this rank's small files, make all its files durable and digest them as the disk returns them."""
    point("ckpt.after_shard_write")
    write_durably(scratch / rng_file(rank()), json.dumps(rng.capture()).encode())
    names = [rng_file(rank()), *(path.name for path in scratch.glob(f"__{rank()}_*"))]
    if rank() == 0:
        write_durably(scratch / TRAIN_STATE, record)
        names += [TRAIN_STATE, ".metadata", "metadata.json"]
    for name in names:
        with (scratch / name).open("rb") as file:
            os.fsync(file.fileno())
    return {name: digest_file(scratch / name) for name in names}


def rng_file(of_rank: int) -> str:
    """Name of the file with one rank's random generators."""
    return f"rng_{of_rank:05d}.json"


def _commit(scratch: Path, final: Path, manifest: Manifest) -> None:
    # A file that another rank wrote is missing here when the folder is not on a file system all nodes share.
    check_sizes(scratch, manifest)
    point("ckpt.manifest")
    write_manifest(scratch, manifest)
    sync_folder(scratch)
    point("ckpt.rename")
    aside = None
    if final.exists():
        aside = final.with_name(scratch_name(manifest.step, "replaced"))
        os.rename(final, aside)
    os.rename(scratch, final)
    point("ckpt.pointer")
    sync_folder(final.parent)
    write_durably(final.parent / LATEST, final.name.encode())
    if aside is not None:
        shutil.rmtree(aside)
