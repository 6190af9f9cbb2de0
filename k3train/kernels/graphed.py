"""A part of the model replayed as CUDA graphs, one launch for its kernels forward and one backward.

A kernel that takes 10 us costs the host as much to launch. What is replayed must launch the same kernels on
every pass, decide nothing on the host, and send nothing to other ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from k3train.backend.derivative import once_differentiable
from k3train.kernels.main_grad import added, main_grad


class Graphed:
    """Calls one function of tensors and of the parameters of ``modules``: the same numbers, launched at once.

    The first pass runs as it is, which compiles its kernels; the second of the same shapes is recorded, then
    replayed, as are all later ones. Only training passes are: with gradients on, on a GPU. Between a forward
    pass and its backward pass others run as they are, because a recording has one place for its values. The
    memory of one pass stays with the recording. Recordings of one ``pool`` share what none of them keeps:
    they are made in the order in which they go forward, go backward in reverse, in one pass at a time, and
    what one gives as gradients must have been read when the next begins.
    """

    def __init__(self, modules: list[nn.Module], pool: str) -> None:
        self.modules, self.pool, self.number = modules, pool, next(_numbers)
        self.recordings: dict[Any, _Recording | None] = {}
        """By shapes of the inputs; None after their first pass. The first that comes back is recorded."""

    def __call__(self, function: Callable[..., Any], *inputs: Tensor) -> Any:
        """``function(*inputs)``, a tensor or a tuple of tensors; the same function in every call.

        The next pass overwrites the result and the gradients of the inputs. ``inputs`` that lie where they
        lay when the pass was recorded are not copied.
        """
        if not (inputs[0].is_cuda and torch.is_grad_enabled() and self.modules[0].training):
            return function(*inputs)
        if any(module._forward_hooks for module in self.modules):  # somebody looks at single modules
            return function(*inputs)
        key = tuple((x.shape, x.stride(), x.dtype, x.requires_grad) for x in inputs)
        recording = self.recordings.get(key)
        if recording is None:
            if key not in self.recordings or any(self.recordings.values()):
                self.recordings[key] = None
                return self._launched(function, inputs)
            memory = _memory(self.pool, self.number)
            recording = self.recordings[key] = _Recording(function, self.modules, inputs, memory)
        if recording.is_busy():
            return self._launched(function, inputs)
        _fill(recording.inputs, inputs)
        outs: Any = _Replay.apply(recording, *inputs, *recording.parameters)
        return outs if recording.is_tuple else outs[0]

    def _launched(self, function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Any:
        """``function(*inputs)`` kernel by kernel, though others of the step may be replayed."""
        out = function(*inputs)
        recording = next(filter(None, self.recordings.values()), None)
        if recording is None:
            return out
        outs: Any = _Fresh.apply(recording.parameters, *(out if recording.is_tuple else (out,)))
        return outs if recording.is_tuple else outs[0]


class _Pass:
    """Lives until the backward pass of a replayed forward pass has run or can no longer run."""


class _Recording:
    """Two graphs, and the tensors that they read and write."""

    def __init__(
        self, function: Callable[..., Any], modules: list[nn.Module], inputs: tuple[Tensor, ...], memory: Any
    ) -> None:
        # What is no activation is the caller's own: he may want to keep it as it is.
        self.inputs = [x.detach().requires_grad_() if x.requires_grad else x.clone() for x in inputs]
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self.running: Any = None
        with _aliased(modules) as aliases, _record(self.forward, memory):
            out = function(*self.inputs)
        self.is_tuple = isinstance(out, tuple)
        self.graph: tuple[Tensor, ...] = out if self.is_tuple else (out,)
        """Holds what the backward pass reads."""
        self.outs = [x.detach() for x in self.graph]
        self.out_grads = [_place(i, x.shape, x.dtype, x.device) for i, x in enumerate(self.graph)]
        sources = [x for x in self.inputs if x.requires_grad]
        self.parameters: dict[Any, Tensor | None] = {}
        """With their gradients; None where the recording adds to ``main_grad``."""
        with _record(self.backward, memory):
            wanted = [*sources, *aliases.values()]
            grads = list(
                torch.autograd.grad(self.graph, wanted, self.out_grads, retain_graph=True, allow_unused=True)
            )
            found = {id(x): self._own(grads.pop(0)) for x in sources}
            for (parameter, alias), grad in zip(aliases.items(), grads, strict=True):
                if grad is not None:
                    total = main_grad(alias)
                    if total is not None and not alias.grad_added_to_main_grad:
                        total.add_(grad)
                    self.parameters[parameter] = grad if total is None else None
        self.grads = [found.get(id(x)) for x in self.inputs]

    def _own(self, grad: Tensor | None) -> Tensor | None:
        """``grad``, unless it is an output's, whose place all recordings use."""
        passed = grad is not None and any(grad.data_ptr() == x.data_ptr() for x in self.out_grads)
        return grad.clone() if passed and grad is not None else grad

    def is_busy(self) -> bool:
        """Whether a forward pass waits for its backward pass."""
        return self.running is not None and self.running() is not None


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recording: _Recording, *_: Tensor) -> tuple[Tensor, ...]:
        recording.forward.replay()
        ctx.recording, ctx.alive = recording, _Pass()
        recording.running = weakref.ref(ctx.alive)
        return tuple(out.detach() for out in recording.outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *out_grads: Tensor) -> tuple[Tensor | None, ...]:
        recording: _Recording = ctx.recording
        _fill(recording.out_grads, out_grads)
        recording.backward.replay()
        ctx.alive, recording.running = None, None
        grads = [None if g is None else g.detach() for g in recording.grads]
        return None, *grads, *(added(p) if g is None else g.clone() for p, g in recording.parameters.items())


class _Fresh(torch.autograd.Function):
    """Its arguments. That replayed passes have added the gradients of some parameters does not hold for the
    backward pass that begins here: megatron-core keeps that note until the end of the step."""

    @staticmethod
    def forward(ctx: Any, parameters: dict[Any, Any], *outs: Tensor) -> tuple[Tensor, ...]:
        ctx.parameters = parameters
        return tuple(out.view_as(out) for out in outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        for parameter in ctx.parameters:
            parameter.grad_added_to_main_grad = False
        return None, *grads


_filled: dict[int, tuple[StorageWeakRef, Any, int]] = {}
"""By address: the memory there, the tensor that was last copied to it, and its version."""


def _fill(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy what does not lie in its place already; a source of many layers is copied once."""
    for place, value in zip(places, values, strict=True):
        at = place.data_ptr()
        if at == value.data_ptr():
            continue
        last = _filled.get(at)
        if last and not last[0].expired() and last[1]() is value and last[2] == value._version:
            continue
        with torch.no_grad():
            place.copy_(value)
        _filled[at] = StorageWeakRef(place.untyped_storage()), weakref.ref(value), value._version


_places: weakref.WeakValueDictionary[Any, Tensor] = weakref.WeakValueDictionary()


def _place(*key: Any) -> Tensor:
    """Where all recordings read the gradient of their output of this number, shape, dtype and device: it is
    copied there right before."""
    place = _places.get(key)
    if place is None:
        _, shape, dtype, device = key
        place = _places[key] = torch.empty(shape, dtype=dtype, device=device)
    return place


@contextmanager
def _aliased(modules: list[nn.Module]) -> Iterator[dict[Any, Any]]:
    """Other tensors in the place of the modules' parameters, on the same memory: autograd ties a parameter
    to the stream on which it was first used, which a recording must not wait for."""
    aliases: dict[Any, Any] = {}
    places = [(m, name) for top in modules for m in top.modules() for name in m._parameters]
    for module, name in places:
        parameter: Any = module._parameters[name]
        if parameter is not None and parameter.requires_grad:
            alias: Any = aliases.setdefault(parameter, parameter.detach().requires_grad_())
            if main_grad(parameter) is not None:
                alias.main_grad, alias.grad_added_to_main_grad = parameter.main_grad, False
            module._parameters[name] = alias
    try:
        yield aliases
    finally:
        back = {id(alias): parameter for parameter, alias in aliases.items()}
        for module, name in places:
            module._parameters[name] = back.get(id(module._parameters[name]), module._parameters[name])


def _record(graph: torch.cuda.CUDAGraph, memory: Any) -> Any:
    # other threads, which bring batches, may go on
    return torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local")


_numbers = count()
_newest: dict[str, int] = {}
"""Of each pool, the number of the last part of the model that was recorded there."""


def _memory(pool: str, number: int) -> Any:
    """The pool's, where what is recorded keeps its values in memory that those before it only pass through.

    One that comes before others which are recorded already gets memory of its own: they would write over what
    it keeps between its passes forward and backward. Shapes that change from pass to pass make that order.
    """
    if number < _newest.get(pool, -1):
        return torch.cuda.graph_pool_handle()
    _newest[pool] = number
    return _pool(pool)


@cache
def _pool(name: str) -> Any:
    return torch.cuda.graph_pool_handle()
