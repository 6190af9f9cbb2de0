"""From a release to a checkpoint that a run starts from."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import yaml
from torch import Tensor

from k3train.checkpoint.hf.config import ReleaseConfig, from_config
from k3train.checkpoint.hf.mxfp4 import decode
from k3train.checkpoint.hf.names import Entry, Form, Shape, packed_names, packed_shapes, table
from k3train.checkpoint.hf.new_folder import check_new
from k3train.checkpoint.hf.problems import raise_all
from k3train.checkpoint.hf.release import Release
from k3train.checkpoint.hf.stored import NewTensor, write_checkpoint
from k3train.checkpoint.hf.values import check_finite, from_release
from k3train.checkpoint.hf.vision import PREFIXES
from k3train.checkpoint.manifest import CheckpointError
from k3train.config.build import to_plain
from k3train.config.schema import Model, Precision

MODEL_GROUP = "model.yaml"
"""File in an imported checkpoint: the model's settings, ready for ``configs/model/``."""

Expected = dict[str, tuple[tuple[str, ...], tuple[Shape, ...]]]
"""By name in the release: the dtypes and the shapes that are accepted."""


def import_release(
    folder: Path, out: Path, *, text_only: bool = False, precision: Precision | None = None
) -> ReleaseConfig:
    """Write the release in ``folder`` as the checkpoint ``out``, which must not exist; returns its config.

    ``text_only`` leaves the image encoder out, which is refused otherwise. ``precision`` replaces the one
    that config.json names. Raises CheckpointError, before anything is written, when a tensor is missing, left
    over, of another shape, or would be rounded; and when one holds NaN or infinity, which leaves nothing.
    """
    check_new(out)
    release = Release(folder)
    config = from_config(release.config)
    if precision is not None:
        config = replace(config, model=replace(config.model, precision=precision))
    entries = table(config.model, config.layout)
    check_tensors(release, config, entries, text_only=text_only)
    if config.tied:
        head = next(entry for entry in entries if entry.ours == "output_head.weight")
        entries[entries.index(head)] = replace(head, name=entries[0].name)
    files = _files(entries, release, config)
    write_checkpoint(
        out,
        files,
        train_state={"step": 0, "tokens": 0, "settings": {"model": to_plain(config.model)}},
        more={MODEL_GROUP: model_group(config.model, folder)},
    )
    return config


def model_group(model: Model, source: Path) -> str:
    """The text of a file for ``configs/model/``."""
    return f"# Imported from {source.name}.\n" + yaml.safe_dump(to_plain(model), sort_keys=False)


def check_tensors(
    release: Release, config: ReleaseConfig, entries: Sequence[Entry], *, text_only: bool
) -> None:
    """Raise CheckpointError when the headers of a release are not those that its config asks for."""
    expected = _expected(config, entries)
    found = release.headers
    images = sorted(name for name in found if name.startswith(PREFIXES))
    if images and not text_only:
        raise CheckpointError(
            f"{release.folder} holds an image encoder ({len(images)} tensors such as {images[0]}), which "
            "k3train does not train: leave it out with --text-only; --vision-from of an export takes it up"
        )
    left_over = sorted(found.keys() - expected.keys() - {*images})
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} is not in the model" for name in left_over]
    for name, (dtypes, shapes) in expected.items():
        if name not in found:
            continue
        dtype, shape = found[name]
        if shape not in shapes:
            problems.append(f"{name} has shape {list(shape)}, the model needs {list(shapes[0])}")
        if dtype not in dtypes:
            problems.append(f"{name} is {dtype}, {_dtype_rule(dtypes)}")
    raise_all(f"{release.folder} does not fit the model that its config.json describes", problems)


def _dtype_rule(dtypes: tuple[str, ...]) -> str:
    if dtypes == ("BF16",):
        return "which a bf16 model would round: import with --precision fp32"
    return f"k3train reads {' or '.join(dtypes)} there"


def _expected(config: ReleaseConfig, entries: Sequence[Entry]) -> Expected:
    expected: Expected = {}
    for entry in entries:
        wide = entry.fp32 or config.model.precision is Precision.fp32
        dtypes = ("BF16", "F32") if wide else ("BF16",)
        if config.tied and entry.ours == "output_head.weight":
            continue
        for name in entry.names:
            if entry.form is Form.experts and config.packed:
                shapes = packed_shapes(entry.stored)
                expected |= {
                    packed: (("U8",), (shape,))
                    for packed, shape in zip(packed_names(name), shapes, strict=True)
                }
            else:
                expected[name] = (dtypes, (entry.stored, *entry.also))
    return expected


def _files(entries: Sequence[Entry], release: Release, config: ReleaseConfig) -> list[list[NewTensor]]:
    """The tensors to store: one file for each layer, one for what stands before and after them."""

    def group(entry: Entry) -> str:
        return ".".join(entry.ours.split(".")[:2]) if entry.ours.startswith("layers.") else ""

    files = []
    for _, members in itertools.groupby(entries, group):
        files.append([_new_tensor(entry, release, config) for entry in members])
    return files


def _new_tensor(entry: Entry, release: Release, config: ReleaseConfig) -> NewTensor:
    wide = entry.fp32 or config.model.precision is Precision.fp32
    dtype = torch.float32 if wide else torch.bfloat16
    packed = config.packed and entry.form is Form.experts
    make = partial(_rows, entry, release, dtype, packed)
    return NewTensor(entry.ours, entry.shape, dtype, make, cut=entry.form is Form.experts)


def _rows(entry: Entry, release: Release, dtype: torch.dtype, packed: bool, first: int, last: int) -> Tensor:
    if entry.form is not Form.experts:
        return check_finite(entry.name, from_release(entry, list(release.tensors(entry.names))).to(dtype))
    names = entry.names[first:last]
    matrices = _unpacked(release, names) if packed else release.tensors(names)
    rows = torch.empty((last - first, *entry.shape[1:]), dtype=dtype)
    for name, row, matrix in zip(names, rows, matrices, strict=True):
        row.copy_(check_finite(name, from_release(entry, [matrix])[0]))
    return rows


def _unpacked(release: Release, names: Sequence[str]) -> Iterator[Tensor]:
    pairs = release.tensors([each for name in names for each in packed_names(name)])
    for name, codes, scales in zip(names, pairs, pairs, strict=True):
        yield decode(codes, scales, name)
