"""Values that the backward pass computes again instead of keeping.

``again`` keeps only a function's inputs, on the host if asked to. ``make_again`` drops what lies between two
functions: what the first makes is cheap to make again, and the second, which would keep it, keeps a note of
how to make it. Neither handles random numbers: nothing in K3 draws any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial, reduce
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from k3train.backend.derivative import once_differentiable


def again(function: Callable[..., Tensor], *inputs: Tensor, on: bool, on_host: bool = False) -> Tensor:
    """``function(*inputs)``; if ``on``, only ``inputs`` are kept for its backward pass.

    With ``on_host`` they are kept in the host's memory, one copy of a tensor for all calls that take it, and
    fetched again for each. Re-entrant, so that the first pass runs without gradients: routers count tokens
    only when gradients are on, that is once.
    """
    if not (on and torch.is_grad_enabled()):
        return function(*inputs)
    kept = torch.autograd.graph.saved_tensors_hooks(_to_host, _from_host) if on_host else nullcontext()
    with kept:
        return checkpoint(function, *inputs, use_reentrant=True, preserve_rng_state=False)  # type: ignore[return-value]


def sum_again(function: Callable[..., Tensor], parts: Sequence[Any], *inputs: Tensor) -> Tensor:
    """The sum of ``function(part, *inputs)`` over ``parts``, each made again right before its own backward
    pass, so that only one part's values exist at a time."""
    return reduce(torch.add, (again(partial(function, part), *inputs, on=True) for part in parts))


class _OnHost:
    """A tensor's copy on the host, and the memory of which it is one."""

    def __init__(self, x: Tensor) -> None:
        self.device, self.source = x.device, StorageWeakRef(x.untyped_storage())
        self.copy = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)
        self.copy.copy_(x, non_blocking=True)


_on_host: WeakValueDictionary[Any, _OnHost] = WeakValueDictionary()
"""Copies that some call keeps, by place, strides and version of what was copied."""


def _to_host(x: Tensor) -> _OnHost:
    key = _storage(x), x.storage_offset(), x.shape, x.stride(), x._version
    kept = _on_host.get(key)
    if kept is None or kept.source.expired():  # the memory may be another tensor's by now
        kept = _on_host[key] = _OnHost(x)
    return kept


def _from_host(kept: _OnHost) -> Tensor:
    return kept.copy.to(kept.device, non_blocking=True)


def make_again(
    make: Callable[..., Tensor | tuple[Tensor, ...]],
    use: Callable[..., Tensor],
    *inputs: Tensor,
    on: bool,
) -> Tensor:
    """``use(make(*inputs))``; if ``on``, nothing that ``make`` computes is kept for the backward pass.

    Whatever ``use`` would keep of the outputs of ``make``, views of them included, is made again when the
    backward pass of ``use`` asks for it, once for all of ``use``. ``inputs`` are kept. Calls may be nested:
    an output of an outer ``make`` that an inner call takes as input is not kept either.
    """
    if not (on and torch.is_grad_enabled()):
        return use(*_as_tuple(make(*inputs)))
    made = _Made(make)
    outputs = _as_tuple(_Make.apply(made, *inputs))
    given = {_storage(x) for x in inputs}
    made.storages = {_storage(x): i for i, x in enumerate(outputs) if _storage(x) not in given and x.numel()}
    _open.append(made)
    try:
        with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
            return use(*outputs)
    finally:
        _open.pop()


_open: list[_Made] = []
"""Calls of ``make_again`` whose ``use`` runs now, innermost last."""


class _Made:
    """Outputs of one ``make``, there again from the backward pass of ``use`` to that of ``make``."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make
        self.node: Any = None
        self.storages: dict[int, int] = {}
        """Output of each storage."""
        self.inputs: tuple[Tensor, ...] = ()
        self.outputs: tuple[Tensor, ...] = ()
        self.ready: Any = None
        """CUDA event after which ``outputs`` hold their values."""

    def remake(self) -> None:
        """Compute the outputs once more, with a graph of their own; on a GPU, make them safe to read here.

        Users may be on different streams (``beside``); the first that asks computes on its own.
        """
        if not self.outputs:
            needed = self.node.needs_input_grad[1:]
            saved = self.node.saved_tensors
            self.inputs = tuple(x.detach().requires_grad_(n) for x, n in zip(saved, needed, strict=True))
            with torch.enable_grad():
                self.outputs = _as_tuple(self.make(*self.inputs))
            if self.outputs[0].is_cuda:
                self.ready = torch.cuda.current_stream().record_event()
        if self.ready is not None:
            here = torch.cuda.current_stream()
            here.wait_event(self.ready)
            for x in (*self.inputs, *self.outputs):
                x.record_stream(here)


class _Make(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, made: _Made, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        ctx.made, made.node = made, ctx
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        return made.make(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        made: _Made = ctx.made
        made.remake()
        pairs = [(out, g) for out, g in zip(made.outputs, gradients, strict=True) if g is not None]
        torch.autograd.backward([out for out, _ in pairs], [g for _, g in pairs])
        inputs = made.inputs
        made.node, made.inputs, made.outputs, made.ready = None, (), (), None
        return None, *(x.grad for x in inputs)


class _Note:
    """In the place of a kept tensor: a view of an output of ``made``."""

    def __init__(self, made: _Made, index: int, view: Tensor) -> None:
        self.made, self.index = made, index
        self.place = view.size(), view.stride(), view.storage_offset()

    def tensor(self) -> Tensor:
        self.made.remake()
        return self.made.outputs[self.index].detach().as_strided(*self.place)


def _pack(kept: Tensor) -> Tensor | _Note:
    storage = _storage(kept)
    for made in reversed(_open):
        if storage in made.storages:
            return _Note(made, made.storages[storage], kept)
    # A node must not hold an output of its own: the two would keep each other alive.
    return kept if kept.is_leaf else kept.detach()


def _unpack(kept: Tensor | _Note) -> Tensor:
    return kept.tensor() if isinstance(kept, _Note) else kept


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _as_tuple(x: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)
