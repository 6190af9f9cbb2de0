"""Reading a released folder: config.json, the index of its safetensors shards, and one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from k3train.checkpoint.hf.names import Shape
from k3train.checkpoint.hf.problems import raise_all
from k3train.checkpoint.manifest import CheckpointError
from k3train.config.json_file import read_json

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
"""The only shard of a release that needs no index."""


class Release:
    """A folder with config.json and safetensors shards. Only headers are read until a tensor is asked for."""

    def __init__(self, folder: Path) -> None:
        """Raise CheckpointError when config or safetensors are missing or the index is not theirs."""
        self.folder = folder
        self.config: dict[str, Any] = _read_json(folder / CONFIG)
        self.headers: dict[str, tuple[str, Shape]] = {}
        """By name: dtype in safetensors' words (BF16, F32, U8) and shape."""
        self._files: dict[str, str] = {}
        indexed = self._index()
        problems: list[str] = []
        for file in sorted({*indexed.values()} or {SINGLE}):
            problems += self._read_header(file)
        if indexed:
            problems += [
                f"{name} is in {INDEX} for {file}, but not in that file"
                for name, file in sorted(indexed.items())
                if self._files.get(name) != file
            ]
            problems += [f"{name} is not in {INDEX}" for name in sorted(self._files.keys() - indexed.keys())]
        raise_all(f"{folder} is not one whole release", problems)

    def tensors(self, names: Sequence[str]) -> Iterator[Tensor]:
        """These tensors in this order, each a copy of its own on the CPU. Shards are closed at the end."""
        file, shard = "", None
        for name in names:
            if shard is None or self._files[name] != file:
                file = self._files[name]
                shard = _open(self.folder / file)
            yield shard.get_tensor(name).clone()

    def _index(self) -> dict[str, str]:
        """Name to shard; empty when there is a single shard without an index."""
        if not (self.folder / INDEX).exists():
            if (self.folder / SINGLE).exists():
                return {}
            raise CheckpointError(
                f"{self.folder} has neither {INDEX} nor {SINGLE}: give a folder of safetensors (pickled "
                "weights are refused, since loading them can run code)"
            )
        weight_map = _read_json(self.folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{self.folder / INDEX} has no weight_map")
        outside = [
            file for file in weight_map.values() if not isinstance(file, str) or Path(file).name != file
        ]
        if outside:
            raise CheckpointError(f"{self.folder / INDEX} points outside its folder: {outside[0]!r}")
        return weight_map

    def _read_header(self, file: str) -> list[str]:
        shard = _open(self.folder / file)
        problems = []
        for name in shard.keys():  # noqa: SIM118 (not a mapping)
            if name in self._files:
                problems.append(f"{name} is in {self._files[name]} and in {file}")
            header = shard.get_slice(name)
            self._files[name] = file
            self.headers[name] = (header.get_dtype(), tuple(header.get_shape()))
        return problems


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path, CheckpointError, "copy the release again")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing: give the folder of a released model") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no mapping of keys")
    return content
