"""Reading a checkpoint into a model of any layout."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from k3train.checkpoint import rng
from k3train.checkpoint.agree import every_rank, on_first_rank, rank
from k3train.checkpoint.finite import listed, not_finite
from k3train.checkpoint.fit import other_precision
from k3train.checkpoint.folder import verify
from k3train.checkpoint.manifest import MANIFEST, CheckpointError, read_manifest
from k3train.checkpoint.reader import PlainReader, plain_data_only
from k3train.checkpoint.stage import FORMAT_NOTE, INDEX, TRAIN_STATE, rng_file
from k3train.checkpoint.state import (
    layout_identity,
    master_slices,
    model_state,
    optimizer_state,
    put_optimizer_state,
    unwrap,
)
from k3train.config.json_file import read_json
from k3train.config.schema import Precision
from k3train.optim.build import allocate_state, members, set_optimizer_steps
from k3train.parallel.groups import Groups

logger = logging.getLogger(__name__)

type _Form = tuple[tuple[int, ...], torch.dtype]
"""Global shape and dtype of a tensor."""

_OPTIMIZER_KEYS = "optimizer."
_NAMES_IN_MESSAGE = 20
_OLDER = "use an older checkpoint"
_ROUTING_RULE = ".router.rule."
"""What a routing rule carries from step to step: another rule, or the same with other options, has other
tensors, starts them afresh and goes on from the bias that all have."""


def read_train_state(path: Path) -> dict[str, Any]:
    """The caller's train state of a checkpoint, without touching tensors. One rank is enough."""
    return _read_record(path)["train"]


def load_checkpoint(
    path: Path, *, chunks: Sequence[Any], optimizer: Any | None, groups: Groups, verified: bool = False
) -> dict[str, Any]:
    """Load parameters, buffers, master weights and moments saved under any layout; return the train state.

    ``verified`` tells that ``newest_good`` or ``verify`` has just read every byte; otherwise this does. With
    ``optimizer=None`` only the model is loaded; a fresh optimizer then needs ``reload_master_weights``, or
    its master weights would undo the load. The random generators continue when the layout is that of the save
    and are seeded anew, the same way every time, when it is another.
    Raises CheckpointError, on every rank, when the checkpoint is damaged or does not fit the model exactly:
    a tensor missing or left over, another shape or dtype; and when it holds NaN or infinity. Every rank of
    the world must call this.
    """
    if not verified:
        verify(path)
    on_first_rank(lambda: _check_files_read(path))
    record = on_first_rank(lambda: _read_record(path))
    model = model_state(chunks, groups)
    stored = PlainReader(path).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        chunk: {
            name: leaf for name, leaf in leaves.items() if leaf.key in stored or not _is_optional(leaf.key)
        }
        for chunk, leaves in model.items()
    }
    if optimizer is not None:
        allocate_state(optimizer)
        state["optimizer"] = optimizer_state(optimizer, model, loading=True)
    _check_fit(path, state, with_optimizer=optimizer is not None)
    loaded = _read_tensors(path, state)
    every_rank(lambda: _put_model(chunks, loaded))
    if optimizer is not None:
        put_optimizer_state(optimizer, loaded["optimizer"])
        set_optimizer_steps(optimizer, record["optimizer_steps"])
    every_rank(lambda: _check_finite(path, chunks, optimizer))
    if optimizer is not None:
        every_rank(lambda: _check_master_weights(path, optimizer))
    _restore_rng(path, record, groups)
    return record["train"]


def _check_files_read(path: Path) -> None:
    """Whatever is read must be in the manifest: only that has been verified."""
    listed = read_manifest(path).files
    for name in (INDEX, FORMAT_NOTE, TRAIN_STATE):
        if name not in listed:
            raise CheckpointError(f"{path / MANIFEST} does not list {name}: this is no checkpoint of k3train")
    if os.path.lexists(path / COMMON_STATE_FNAME):
        raise CheckpointError(
            f"{path / COMMON_STATE_FNAME} is no part of the checkpoint, and megatron-core would load it: "
            "remove it"
        )


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = read_json(path / TRAIN_STATE, CheckpointError, _OLDER)
    except FileNotFoundError:
        raise CheckpointError(f"{path / TRAIN_STATE} is missing; {_OLDER}") from None
    if not isinstance(record, dict) or not isinstance(record.get("train"), dict):
        raise CheckpointError(f"{path / TRAIN_STATE} holds no train state: this is no checkpoint of k3train")
    return record


def _read_tensors(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    def read() -> Any:
        with plain_data_only(), warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", module=r"torch\.distributed\.checkpoint"
            )  # about its own insides
            return dist_checkpointing.load(state, str(path), validate_access_integrity=False)

    return _raised_everywhere(read)


def _raised_everywhere(work: Callable[[], Any]) -> Any:
    """``work``'s result on this rank, or CheckpointError on every rank when it failed on one."""
    kept: list[Any] = []
    every_rank(lambda: kept.append(work()))
    return kept[0]


def _check_fit(path: Path, state: dict[str, Any], *, with_optimizer: bool) -> None:
    """Compare names, shapes and dtypes with the checkpoint: torch casts a dtype and skips a name silently."""
    wanted: dict[str, _Form] = {}

    def collect() -> dict[str, _Form]:
        copied: Any = dict_list_map_outplace(lambda leaf: leaf, state)
        apply_factories(copied)
        tensors = [leaf for leaf in nested_values(copied) if isinstance(leaf, ShardedTensor)]
        return {leaf.key: (tuple(leaf.global_shape), leaf.dtype) for leaf in tensors}

    for own in every_rank(collect):
        wanted.update(own)

    def compare() -> None:
        metadata = PlainReader(path).read_metadata().state_dict_metadata
        stored = {
            key: (tuple(entry.size), entry.properties.dtype)
            for key, entry in metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        if not with_optimizer:
            stored = {key: value for key, value in stored.items() if not key.startswith(_OPTIMIZER_KEYS)}
        changed = [key for key in sorted(wanted.keys() & stored.keys()) if wanted[key] != stored[key]]
        problems = [
            *(f"{key} is not in the checkpoint" for key in sorted(wanted.keys() - stored.keys())),
            *(
                f"{key} is not in the model"
                for key in sorted(stored.keys() - wanted.keys())
                if not _is_optional(key)
            ),
            *(
                f"{key} is {_form(*stored[key])} in the checkpoint and {_form(*wanted[key])} in the model"
                for key in changed
            ),
        ]
        if problems:
            differ = [(stored[key], wanted[key]) for key in changed]
            if len(changed) == len(problems) and (found := _precisions(differ)):
                rule, fix = other_precision(*found)
                raise CheckpointError(f"{path} {rule}. {fix}")
            more = len(problems) - _NAMES_IN_MESSAGE
            listed = "\n  ".join([*problems[:_NAMES_IN_MESSAGE], *([f"and {more} more"] if more > 0 else [])])
            raise CheckpointError(
                f"{path} does not fit this model; use the model settings it was saved with:\n  {listed}"
            )

    on_first_rank(compare)


def _precisions(differ: list[tuple[_Form, _Form]]) -> tuple[Precision, Precision] | None:
    """The checkpoint's precision and the model's, when these forms in both differ in nothing else."""
    dtypes = {(theirs[1], ours[1]) for theirs, ours in differ}
    if len(dtypes) != 1 or any(theirs[0] != ours[0] for theirs, ours in differ):
        return None
    names = {torch.bfloat16: Precision.bf16, torch.float32: Precision.fp32}
    theirs, ours = dtypes.pop()
    return (names[theirs], names[ours]) if theirs in names and ours in names else None


def _is_optional(key: str) -> bool:
    return _ROUTING_RULE in key


def _form(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _put_model(chunks: Sequence[Any], loaded: dict[str, Any]) -> None:
    for i, chunk in enumerate(chunks):
        result = unwrap(chunk).load_state_dict(loaded[f"model{i}"], strict=False)
        missing = [
            name
            for name in result.missing_keys
            if not name.endswith("_extra_state") and not _is_optional(name)
        ]
        if missing or result.unexpected_keys:
            raise CheckpointError(f"not loaded: {missing}; not in the model: {result.unexpected_keys}")


def _check_finite(path: Path, chunks: Sequence[Any], optimizer: Any | None) -> None:
    if names := not_finite(chunks, optimizer):
        raise CheckpointError(
            f"{path}: {listed(names)}, and nothing can be trained from it: move this checkpoint away and use "
            "an older one"
        )


@torch.no_grad()
def _check_master_weights(path: Path, optimizer: Any) -> None:
    """bf16 parameters must be the rounded master weights, or the first step would jump."""
    for each in members(optimizer):
        for param, master in master_slices(each).items():
            span = each._get_model_param_range_map(param)["param"]
            own = param.view(-1)[span.start : span.end]
            if not torch.equal(own, master.to(own)):
                raise CheckpointError(
                    f"{path}: parameters and fp32 master weights differ for a tensor of shape "
                    f"{list(param.shape)}: the checkpoint mixes two states, use an older one"
                )


def _restore_rng(path: Path, record: dict[str, Any], groups: Groups) -> None:
    same = record["layout"] == layout_identity(groups)

    def restore() -> None:
        file = path / rng_file(rank() if same else 0)
        try:
            if same:
                rng.restore(read_json(file, CheckpointError, _OLDER))
            else:
                rng.reseed(file.read_text())
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, OverflowError) as error:
            raise CheckpointError(f"{file} cannot be read: {error!r}; {_OLDER}") from error

    every_rank(restore)
    if not same and rank() == 0:
        logger.info(
            "%s was saved under another layout: random generators are seeded anew from its state", path.name
        )
