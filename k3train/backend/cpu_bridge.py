"""Lets megatron-core 0.19.2, which names CUDA in some 390 places, run on the CPU with gloo.

``install`` does nothing when a GPU is visible. Without one it redirects, process-wide and reversibly:

1. the ``torch.cuda`` entry points that megatron-core calls unconditionally;
2. ``device="cuda"`` (or an index) in tensor factories and methods, ``pin_memory`` and ``.cuda()``;
   ``Tensor.type()`` answers ``torch.cuda.*`` because megatron-core compares those strings;
3. what gloo lacks: averaging all-reduce and all-gather of unequal sizes;
4. ``torch.compile``, which on the CPU would import inductor and build C++ for each small function;
5. Transformer Engine and apex, which megatron-core takes wherever they can be imported: they cannot be then.

Since ``Tensor.type()`` then answers other libraries too, only programs that train (and tests) install it.
A ``TorchFunctionMode`` in place of 2 does not work: torch 2.11 leaves the mode inside ``Tensor.backward``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_CPU = torch.device("cpu")
_FACTORIES = (
    "arange as_tensor empty empty_like empty_strided eye full full_like linspace logspace ones ones_like "
    "rand rand_like randint randn randn_like randperm scalar_tensor tensor tril_indices triu_indices "
    "zeros zeros_like"
).split()
_NEW_METHODS = "new_empty new_full new_ones new_tensor new_zeros".split()
_GPU_ONLY = ("transformer_engine", "apex")
_installed = False


class _Inert:
    """Stands in for ``torch.cuda.Stream`` and ``torch.cuda.Event``: every method does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., _Inert]:
        return lambda *args, **kwargs: self


def is_installed() -> bool:
    """Whether the bridge is active in this process."""
    return _installed


def install(*, force: bool = False) -> bool:
    """Activate the bridge; returns whether it is active.

    Must run before ``megatron.core`` is imported. With ``force`` it is installed although a GPU is visible,
    for runs with ``device=cpu``.
    """
    global _installed
    if _installed:
        return True
    if torch.cuda.is_available() and not force:
        return False
    _redirect_cuda_module()
    _redirect_devices()
    _complete_gloo()
    _patch(torch, "compile", lambda model=None, **kwargs: model if model is not None else (lambda f: f))
    for package in _GPU_ONLY:
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]
    _redirect_rng_tracker()
    _installed = True
    return True


def _patch(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


def _constant(value: Any) -> Callable[..., Any]:
    # A fresh function for each name: dynamo refuses one object known under two torch.cuda names.
    return lambda *args, **kwargs: value


def _redirect_cuda_module() -> None:
    cuda = torch.cuda
    stream = _Inert()
    constants = {
        "current_device": 0,
        "device_count": 1,
        "set_device": None,
        "synchronize": None,
        "empty_cache": None,
        "manual_seed_all": None,
        "reset_peak_memory_stats": None,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "current_stream": stream,
        "default_stream": stream,
    }
    for name, value in constants.items():
        _patch(cuda, name, _constant(value))
    _patch(cuda, "Stream", _Inert)
    _patch(cuda, "Event", _Inert)
    _patch(cuda, "stream", lambda stream: contextlib.nullcontext())
    for name in ("range_push", "range_pop"):
        _patch(cuda.nvtx, name, _constant(None))
    _patch(cuda, "manual_seed", lambda seed: torch.default_generator.manual_seed(seed))
    for module in (cuda, cuda.random):
        _patch(module, "get_rng_state", lambda device=None: torch.get_rng_state())
        _patch(module, "set_rng_state", lambda state, device=None: torch.set_rng_state(state))


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return type(device) is int or (isinstance(device, str) and device.startswith("cuda"))


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None and _is_cuda(kwargs["device"]):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return wrapped


def _redirect_devices() -> None:
    tensor = torch.Tensor
    for name in _FACTORIES:
        _patch(torch, name, _on_cpu(getattr(torch, name)))
    for name in _NEW_METHODS:
        _patch(tensor, name, _on_cpu(getattr(tensor, name)))
    to, type_of = tensor.to, tensor.type

    @functools.wraps(to)
    def to_cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        args = tuple(_CPU if _is_cuda(a) else a for a in args)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return to(self, *args, **kwargs)

    def cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return type_of(self, *args, **kwargs)
        return type_of(self).replace("torch.", "torch.cuda.", 1)

    _patch(tensor, "to", to_cpu)
    _patch(tensor, "type", cuda_type)
    _patch(tensor, "cuda", lambda self, *args, **kwargs: self)
    _patch(tensor, "pin_memory", lambda self, *args, **kwargs: self)


class _Done:
    """The work handle of a collective that has already ended."""

    def wait(self, *args: Any) -> bool:
        return True


def _complete_gloo() -> None:
    reduce_all, gather_all = dist.all_reduce, dist.all_gather

    @functools.wraps(reduce_all)
    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if op == dist.ReduceOp.AVG and dist.get_backend(group) == "gloo":
            tensor.div_(dist.get_world_size(group))
            op = dist.ReduceOp.SUM
        return reduce_all(tensor, op=op, group=group, async_op=async_op)

    @functools.wraps(gather_all)
    def all_gather(tensor_list, tensor, group=None, async_op=False):
        if dist.get_backend(group) != "gloo" or len({t.numel() for t in tensor_list}) == 1:
            return gather_all(tensor_list, tensor, group=group, async_op=async_op)
        for index, target in enumerate(tensor_list):
            source = index if group is None else dist.get_global_rank(group, index)
            if source == dist.get_rank():
                target.copy_(tensor)
            if target.numel():
                dist.broadcast(target, src=source, group=group)
        return _Done() if async_op else None

    gather_coalesced = dist.ProcessGroup.allgather_into_tensor_coalesced

    @functools.wraps(gather_coalesced)
    def allgather_into_tensor_coalesced(self, outputs, inputs, *options):
        """gloo flattens everything into the first tensor's dtype; several dtypes come back as garbage."""
        work = None
        for dtype in dict.fromkeys(tensor.dtype for tensor in inputs):
            if work is not None:
                work.wait()
            chosen = [i for i, tensor in enumerate(inputs) if tensor.dtype is dtype]
            work = gather_coalesced(self, [outputs[i] for i in chosen], [inputs[i] for i in chosen], *options)
        return work

    _patch(dist.ProcessGroup, "allgather_into_tensor_coalesced", allgather_into_tensor_coalesced)
    _patch(dist, "all_reduce", all_reduce)
    _patch(dist, "all_gather", all_gather)


def _redirect_rng_tracker() -> None:
    from megatron.core.tensor_parallel import random as megatron_random

    quiet = logging.getLogger(megatron_random.__name__)
    quiet.addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())
    _patch(megatron_random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state())
    _patch(megatron_random, "_set_cuda_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state))
