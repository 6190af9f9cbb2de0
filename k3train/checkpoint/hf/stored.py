"""k3train checkpoints on one process without process groups: whole tensors in, and whole tensors out.

Which layout wrote a checkpoint shows only in how its tensors are cut, and the index tells where each piece
belongs.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.utils import _create_file_view

from k3train.checkpoint.hf.names import Shape
from k3train.checkpoint.hf.new_folder import new_folder
from k3train.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    digest_file,
    write_durably,
    write_manifest,
)
from k3train.checkpoint.reader import PlainReader
from k3train.checkpoint.stage import FORMAT_NOTE, TRAIN_STATE, rng_file

CHUNK_BYTES = 1 << 28
"""Largest piece in which a stack of experts is stored: what a loading rank reads at once."""

_COMMON = "common_state/shard_0_1"
"""Where megatron-core keeps what is not a tensor; k3train keeps nothing there."""


class StoredTensors:
    """The tensors of a checkpoint by their global names. ``forms`` has their (shape, dtype)."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError when the index is damaged or more than plain data."""
        self._path = path
        self._metadata = PlainReader(path).read_metadata()
        self._entries = {
            name: entry
            for name, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.forms: dict[str, tuple[Shape, torch.dtype]] = {
            name: (tuple(entry.size), entry.properties.dtype) for name, entry in self._entries.items()
        }

    def read(self, name: str) -> Tensor:
        """The whole tensor, on the CPU."""
        shape, dtype = self.forms[name]
        chunks = self._entries[name].chunks
        if len(chunks) == 1:
            return self._piece(name, chunks[0])
        whole = torch.empty(shape, dtype=dtype)
        for chunk in chunks:
            place = zip(chunk.offsets, chunk.sizes, strict=True)
            whole[tuple(slice(first, first + size) for first, size in place)] = self._piece(name, chunk)
        return whole

    def _piece(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        """One piece, read straight into its place: torch's reader would hold it twice beside the whole."""
        info = self._metadata.storage_data[MetadataIndex(name, chunk.offsets)]
        path = self._path / info.relative_path
        with path.open("rb") as file:
            view: Any = _create_file_view(file, info.offset, info.length)
            try:
                piece = torch.load(view, map_location="cpu", weights_only=True)
            except Exception as error:  # torch refuses in several ways whatever is no tensor
                raise CheckpointError(
                    f"{name} in {path} cannot be read as a plain tensor: {error}"
                ) from error
        form = self.forms[name][1], chunk.sizes
        if not isinstance(piece, Tensor) or (piece.dtype, piece.shape) != form:
            raise CheckpointError(f"{path} does not hold its piece of {name}")
        return piece


class NewTensor:
    """A tensor that is to be stored, and how to make rows [first, last) of it when its turn comes."""

    def __init__(
        self, name: str, shape: Shape, dtype: torch.dtype, make: Callable[[int, int], Tensor], *, cut: bool
    ) -> None:
        self.name, self.shape, self.dtype, self.make = name, shape, dtype, make
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        rows = max(1, CHUNK_BYTES // row_bytes) if cut else shape[0]
        self.spans = [(first, min(first + rows, shape[0])) for first in range(0, shape[0], rows)]

    def items(self) -> list[WriteItem]:
        """One request to torch's writer for each piece."""
        return [self._item(number, *span) for number, span in enumerate(self.spans)]

    def _item(self, number: int, first: int, last: int) -> WriteItem:
        offsets = torch.Size([first, *(0 for _ in self.shape[1:])])
        return WriteItem(
            index=MetadataIndex(self.name, offsets, number),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets, torch.Size([last - first, *self.shape[1:]])),
                properties=TensorProperties(dtype=self.dtype),
                size=torch.Size(self.shape),
            ),
        )


def write_checkpoint(
    path: Path, files: Sequence[Sequence[NewTensor]], *, train_state: dict[str, Any], more: dict[str, str]
) -> None:
    """Write a checkpoint without optimizer state at ``path``: each group of ``files`` goes into one file.

    ``more`` holds texts by file name. One piece of a tensor is in memory at a time. The folder appears under
    its name complete or not at all.
    """
    with new_folder(path) as scratch:
        _write_tensors(scratch, files)
        record = {
            "train": train_state,
            "optimizer_steps": 0,
            "layout": {},  # no run's: whoever loads this seeds its random generators anew
            "versions": {name: version(name) for name in ("torch", "megatron-core", "numpy")},
        }
        write_durably(scratch / TRAIN_STATE, json.dumps(record, sort_keys=True, indent=1).encode())
        write_durably(scratch / rng_file(0), json.dumps({"imported": path.name}).encode())
        for name, text in more.items():
            write_durably(scratch / name, text.encode())
        versions = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        write_durably(scratch / FORMAT_NOTE, json.dumps(versions).encode())
        digests = {file.name: digest_file(file) for file in sorted(scratch.iterdir())}
        write_manifest(scratch, Manifest(step=train_state["step"], milestone=True, files=digests))


def _write_tensors(folder: Path, files: Sequence[Sequence[NewTensor]]) -> None:
    planner = _Planner([tensor for group in files for tensor in group])
    plans = [SavePlan([item for tensor in group for item in tensor.items()]) for group in files]
    plans[0].items.append(WriteItem(index=MetadataIndex(_COMMON), type=WriteItemType.BYTE_IO))
    plans, metadata = create_default_global_save_plan(plans)
    writer = _Writer(folder)
    writer.set_up_storage_writer(is_coordinator=True)
    plans = writer.prepare_global_plan([writer.prepare_local_plan(plan) for plan in plans])
    results = [writer.write_data(plan, planner).wait() for plan in plans]
    writer.finish(metadata, results)


class _Writer(FileSystemWriter):
    """torch's writer, whose index does not remember where it was written: it holds plain data only."""

    def storage_meta(self) -> StorageMeta:
        """Nothing but the number of the save."""
        return StorageMeta(save_id=self.save_id)


class _Planner(SavePlanner):
    """Makes each piece when torch's writer asks for it."""

    def __init__(self, tensors: Sequence[NewTensor]) -> None:
        self.tensors = {tensor.name: tensor for tensor in tensors}

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the plan is made by ``_write_tensors``."""

    create_local_plan = create_global_plan = finish_plan = set_up_planner  # type: ignore[assignment]

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The values of one piece, or what is not a tensor: nothing."""
        if write_item.type is WriteItemType.BYTE_IO:
            content = io.BytesIO()
            torch.save([{}], content)
            content.seek(0)
            return content
        tensor = self.tensors[write_item.index.fqn]
        assert write_item.index.index is not None
        piece = tensor.make(*tensor.spans[write_item.index.index]).contiguous()
        assert piece.dtype is tensor.dtype, tensor.name
        return piece
