"""From a checkpoint of any parallel layout to a release."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3train.checkpoint.folder import newest_good, verify
from k3train.checkpoint.hf.config import own_settings, to_config
from k3train.checkpoint.hf.names import Entry, Form, Layout, table
from k3train.checkpoint.hf.new_folder import check_new, new_folder
from k3train.checkpoint.hf.problems import raise_all
from k3train.checkpoint.hf.release import CONFIG, Release
from k3train.checkpoint.hf.shards import Planned, plan_shards, write_shards
from k3train.checkpoint.hf.stored import StoredTensors
from k3train.checkpoint.hf.values import check_finite, to_release
from k3train.checkpoint.hf.vision import PREFIXES, read_vision, vision_tensors
from k3train.checkpoint.load import read_train_state
from k3train.checkpoint.manifest import MANIFEST, CheckpointError
from k3train.checkpoint.stage import TRAIN_STATE
from k3train.config.build import Builder
from k3train.config.schema import Model, Precision, Run

OPTIMIZER_KEYS = "optimizer."


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written."""

    checkpoint: Path
    tensors: int
    size_bytes: int
    own_settings: dict[str, Any]
    """Settings that the release's configuration has no key for; its own modelling code does not know them."""


def export_release(
    source: Path,
    out: Path,
    *,
    layout: Layout = Layout.k3,
    precision: Precision = Precision.bf16,
    like_release: bool = False,
    vision_from: Path | None = None,
    shard_bytes: int = 5 * 10**9,
) -> Exported:
    """Write the checkpoint ``source``, or a run's newest good one, as a release in the new folder ``out``.

    Matrices are stored in ``precision``. What k3train keeps in fp32 stays fp32; ``like_release`` rounds to
    bf16 what the release has in bf16 of it: router, norms, depth mixes. ``vision_from`` is a release whose
    image encoder is copied. Raises CheckpointError when the checkpoint is damaged, not of its own model, or
    holds NaN or infinity.
    """
    check_new(out)
    path = _checkpoint(source)
    run = read_settings(path)
    stored = StoredTensors(path)
    entries = [entry for entry in table(run.model, layout) if entry.written]
    _check_stored(path, stored, run.model)
    vision = _vision(vision_from, run.model, layout)
    fp32 = partial(_is_fp32, precision=precision, like_release=like_release)
    values = _Values(entries, stored, vision)
    planned = [
        Planned(name=name, dtype=torch.float32 if fp32(entry) else torch.bfloat16, shape=entry.stored)
        for entry in entries
        for name in entry.names
    ]
    planned += values.vision_plan()
    longest = max((stage.context_tokens for stage in run.curriculum.stages.values()), default=None)
    config = to_config(
        run.model,
        layout,
        precision=precision,
        vision=vision.config["vision_config"] if vision else None,
        max_tokens=longest,
    )
    _write(out, config, plan_shards(planned, shard_bytes), values, Path(run.data.tokenizer or "/nowhere"))
    return Exported(
        checkpoint=path,
        tensors=len(planned),
        size_bytes=sum(tensor.size_bytes for tensor in planned),
        own_settings=own_settings(run.model, precision),
    )


def read_settings(path: Path) -> Run:
    """Settings that a checkpoint was trained with; an imported one knows its model only."""
    try:
        settings = read_train_state(path)["settings"]
    except KeyError as error:
        raise CheckpointError(
            f"{path / TRAIN_STATE} does not tell the model's settings: {error!r}"
        ) from error
    builder = Builder()
    run = builder.build(settings)
    problems = [str(problem) for problem in builder.problems if problem.key.startswith("model")]
    raise_all(f"{path / TRAIN_STATE} has settings of another version of k3train", problems)
    return run


def _checkpoint(source: Path) -> Path:
    if (source / MANIFEST).exists():
        verify(source)
        return source
    newest = newest_good(source / "checkpoints")
    if newest is None:
        what = (
            f"is no checkpoint, and {source / 'checkpoints'} holds none"
            if source.exists()
            else "does not exist"
        )
        raise CheckpointError(f"{source} {what}: give a trained run's folder, or one of its checkpoints")
    return newest


def _check_stored(path: Path, stored: StoredTensors, model: Model) -> None:
    found = {name: form for name, form in stored.forms.items() if not name.startswith(OPTIMIZER_KEYS)}
    narrow = torch.bfloat16 if model.precision is Precision.bf16 else torch.float32
    wanted = {entry.ours: (entry.shape, torch.float32 if entry.fp32 else narrow) for entry in table(model)}
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [f"{name} is not in the model" for name in sorted(found.keys() - wanted.keys())]
    problems += [
        f"{name} is {found[name][1]} {list(found[name][0])}, the model needs {dtype} {list(shape)}"
        for name, (shape, dtype) in wanted.items()
        if name in found and found[name] != (shape, dtype)
    ]
    raise_all(f"{path} does not hold the model that it names", problems)


def _vision(folder: Path | None, model: Model, layout: Layout) -> Release | None:
    """The release whose image encoder is taken, checked against its own vision_config."""
    if folder is None:
        return None
    if layout is not Layout.k3:
        raise CheckpointError("--vision-from needs --layout k3: Kimi Linear's layout has no image encoder")
    release = Release(folder)
    config = release.config.get("vision_config")
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder}: config.json has no vision_config")
    vision = read_vision(config)
    wanted = dict(vision_tensors(vision))
    found = {name: form for name, form in release.headers.items() if name.startswith(PREFIXES)}
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [f"{name} is no part of the image encoder" for name in sorted(found.keys() - wanted.keys())]
    problems += [
        f"{name} is {found[name][0]} {list(found[name][1])}, vision_config asks for BF16 {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != ("BF16", shape)
    ]
    if vision.text_hidden_size != model.hidden_size:
        problems.append(
            f"its projector leads to {vision.text_hidden_size}, model.hidden_size is {model.hidden_size}"
        )
    raise_all(f"{folder} has no image encoder for this model", problems)
    return release


def _is_fp32(entry: Entry, *, precision: Precision, like_release: bool) -> bool:
    if precision is Precision.fp32:
        return True
    return entry.released_fp32 if like_release else entry.fp32


class _Values:
    """Values of the tensors of an export, read when they are asked for."""

    def __init__(self, entries: Sequence[Entry], stored: StoredTensors, vision: Release | None) -> None:
        self.stored, self.vision = stored, vision
        self.places = {name: (entry, i) for entry in entries for i, name in enumerate(entry.names)}
        self.stack: tuple[str, Tensor] | None = None
        """The experts read last: their matrices follow one another."""

    def vision_plan(self) -> list[Planned]:
        """Tensors of the image encoder."""
        if self.vision is None:
            return []
        tensors = vision_tensors(read_vision(self.vision.config["vision_config"]))
        return [Planned(name=name, dtype=torch.bfloat16, shape=shape) for name, shape in tensors]

    def __call__(self, planned: Planned) -> Tensor:
        if planned.name not in self.places:
            assert self.vision is not None
            return check_finite(planned.name, next(self.vision.tensors([planned.name])))
        entry, index = self.places[planned.name]
        value = to_release(entry, self._whole(entry), index).to(planned.dtype)
        return check_finite(f"{entry.ours} ({planned.name})", value)

    def _whole(self, entry: Entry) -> Tensor:
        if entry.form is not Form.experts:
            return self.stored.read(entry.ours)
        if self.stack is None or self.stack[0] != entry.ours:
            self.stack = None  # before the next is read: one at a time
            self.stack = (entry.ours, self.stored.read(entry.ours))
        return self.stack[1]


def _write(
    out: Path, config: dict[str, Any], shards: Sequence[Sequence[Planned]], values: _Values, tokenizer: Path
) -> None:
    """Fill the new folder."""
    with new_folder(out) as scratch:
        write_shards(scratch, shards, values)
        (scratch / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        if tokenizer.is_file():
            shutil.copyfile(tokenizer, scratch / "tokenizer.json")
