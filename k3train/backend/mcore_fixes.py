"""Faults of megatron-core 0.19.2 that k3train sets right, on the CPU and on a GPU alike.

Each function is one fault; ``apply`` sets all of them right, once. They are pinned to that version: ``apply``
refuses another one, because a fix for code that has changed is a new fault.
"""

from __future__ import annotations

import functools
import sys
import warnings
from importlib.metadata import version
from typing import Any

import torch

MEGATRON_VERSION = "0.19.2"
_applied = False


def before_import() -> None:
    """What must hold before megatron-core is first imported.

    It imports nvidia-resiliency-ext's checkpoints where that is installed, which k3train does not use, and
    with a version below 0.6 that ends in an AttributeError.
    """
    sys.modules.setdefault("nvidia_resiliency_ext.checkpointing", None)  # pyright: ignore[reportArgumentType]


def apply() -> None:
    """Set every fault right in this process. Raises RuntimeError for another megatron-core."""
    global _applied
    if _applied:
        return
    found = version("megatron-core")
    if found != MEGATRON_VERSION:
        raise RuntimeError(
            f"megatron-core {found} is installed, k3train needs {MEGATRON_VERSION}: "
            f"pip install megatron-core=={MEGATRON_VERSION}"
        )
    _checkpoint_without_output_thinks_it_is_fp8()
    _split_sizes_stay_tensors_on_the_cpu()
    _checkpoints_forget_padding_between_buckets()
    _gradient_norm_waits_for_every_tensor()
    _applied = True


def _checkpoint_without_output_thinks_it_is_fp8() -> None:
    """``CheckpointWithoutOutput(fp8=False)`` stores ``fp8 is not None``: a NameError without TE."""
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    CheckpointWithoutOutput.__init__.__defaults__ = (None,)


def _split_sizes_stay_tensors_on_the_cpu() -> None:
    """Split sizes that already lie on the CPU stay tensors, which ``all_to_all_single`` refuses."""
    from megatron.core.transformer.moe import token_dispatcher

    move = token_dispatcher.maybe_move_tensor_to_cpu

    @functools.wraps(move)
    def move_and_convert(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        moved = move(tensor, as_numpy=as_numpy, record_stream=record_stream)
        return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved

    token_dispatcher.maybe_move_tensor_to_cpu = move_and_convert


def _checkpoints_forget_padding_between_buckets() -> None:
    """Optimizer state is joined for a checkpoint without the padding at buckets' ends, but cut with it.

    With several buckets (overlapped reduction, or the embedding shared for MTP) moments and master weights
    would be saved under their neighbours' names and the last ones lost. Counting the padding in makes both
    sides agree.
    """
    with warnings.catch_warnings():  # four modules warn of what they would have liked to be installed
        warnings.simplefilter("ignore")
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    compute = DistributedOptimizer._compute_per_buffer_param_layout

    @functools.wraps(compute)
    def with_padding(*args: Any, **kwargs: Any) -> Any:
        layout = compute(*args, **kwargs)
        layout.per_bucket_numel_unpadded = [stop - start for start, stop in layout.bucket_indices]
        return layout

    DistributedOptimizer._compute_per_buffer_param_layout = staticmethod(with_padding)


def _gradient_norm_waits_for_every_tensor() -> None:
    """Without TE and apex the norm is fetched tensor by tensor, and clipping copies every gradient."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import utils
        from megatron.core.optimizer import clip_grads

    def norm(_chunk: int, _overflow: Any, lists: list[list[torch.Tensor]], *_: Any) -> tuple[Any, None]:
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(lists[0]))).reshape(1), None

    def scale(_chunk: int, _overflow: Any, lists: list[list[torch.Tensor]], factor: float) -> None:
        source, target = lists
        if target is not source:
            torch._foreach_copy_(target, source)
        torch._foreach_mul_(target, factor)

    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = norm
    if clip_grads.multi_tensor_scale_impl is utils.local_multi_tensor_scale:
        clip_grads.multi_tensor_scale_impl = scale
