"""Reading torch's checkpoint format without running what it contains.

``.metadata`` is a pickle, and torch loads it and every byte object in the shards with the full unpickler. A
folder from elsewhere would be a program. Here the unpickler knows a short list of plain data classes.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from torch.distributed.checkpoint import FileSystemReader, Metadata
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner

from k3train.checkpoint.manifest import CheckpointError

_ALLOWED = {
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "collections": {"OrderedDict"},
}


class _PlainUnpickler(pickle.Unpickler):
    """Knows only the classes of a checkpoint's metadata."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(f"the checkpoint's .metadata asks for {module}.{name}: refused, it may be code")


class PlainReader(FileSystemReader):
    """torch's FileSystemReader that loads data only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's index. Raises CheckpointError when it holds anything but plain data classes."""
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                metadata = _PlainUnpickler(file).load()
        except CheckpointError:
            raise
        except Exception as error:  # a damaged pickle raises anything
            raise CheckpointError(f"{path} is damaged: {error}") from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{path} holds a {type(metadata).__name__}, not a checkpoint's index")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        for info in (metadata.storage_data or {}).values():
            if Path(info.relative_path).name != info.relative_path:
                raise CheckpointError(f"{path} points outside its folder: {info.relative_path}")
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Read the planned tensors; byte objects are let through only when they load as plain data."""
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                self._check_bytes(item.storage_index)
        try:
            return super().read_data(plan, planner)
        except Exception as error:  # torch refuses in several ways whatever is no tensor
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise CheckpointError(f"{self.path} cannot be read as plain tensors: {reason}") from error

    def _check_bytes(self, index: Any) -> None:
        info = self.storage_data[index]
        with (Path(self.path) / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            content = io.BytesIO(file.read(info.length))
        try:
            torch.load(content, weights_only=True)
        except Exception as error:  # whatever it raises, the planner must not unpickle this
            where = Path(self.path) / info.relative_path
            raise CheckpointError(
                f"{index.fqn} in {where} is not plain data: refused, it may be code"
            ) from error


@contextmanager
def plain_data_only() -> Iterator[None]:
    """Within it, megatron-core's dist_checkpointing reads through PlainReader."""

    def reader(checkpoint_dir: Any, *_: Any, **__: Any) -> PlainReader:
        return PlainReader(checkpoint_dir)

    modules = (serialization, torch_strategy)
    before = [module._get_filesystem_reader for module in modules]
    for module in modules:
        setattr(module, "_get_filesystem_reader", reader)  # noqa: B010 (a private name of megatron-core)
    try:
        yield
    finally:
        for module, original in zip(modules, before, strict=True):
            setattr(module, "_get_filesystem_reader", original)  # noqa: B010
