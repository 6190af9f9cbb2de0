"""A part of the model replayed as CUDA graphs, one launch for its kernels forward and one backward.

A kernel that takes 10 us costs the host as much to launch. What is replayed must launch the same kernels on
every pass, decide nothing on the host, and send nothing to other ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from k3train.kernels.main_grad import added, main_grad


class Graphed:
    """Calls one function of tensors and of the parameters of ``modules``: the same numbers, launched at once.

    The first pass runs as it is, which compiles its kernels; the second of the same shapes is recorded, then
    replayed, as are all later ones. Only training passes are: with gradients on, on a GPU. Between a forward
    pass and its backward pass others run as they are, because a recording has one place for its values. The
    memory of one pass stays with the recording.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules
        self.recordings: dict[Any, _Recording | None] = {}
        """By shapes of the inputs; None after their first pass. The first that comes back is recorded."""

    def __call__(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """``function(*inputs)``, the same function in every call.

        The next pass overwrites the result and the gradients of the inputs.
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
                return function(*inputs)
            recording = self.recordings[key] = _Recording(function, self.modules, inputs)
        if recording.is_busy():
            return function(*inputs)
        out = _Replay.apply(recording, *inputs, *recording.parameters)
        assert isinstance(out, Tensor)
        return out


class _Pass:
    """Lives until the backward pass of a replayed forward pass has run or can no longer run."""


class _Recording:
    """Two graphs, and the tensors that they read and write."""

    def __init__(
        self, function: Callable[..., Tensor], modules: list[nn.Module], inputs: tuple[Tensor, ...]
    ) -> None:
        # What is no activation is the caller's own: he may want to keep it as it is.
        self.inputs = [x.detach().requires_grad_() if x.requires_grad else x.clone() for x in inputs]
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self.running: Any = None
        with _aliased(modules) as aliases, _record(self.forward):
            out = function(*self.inputs)
        self.parameters = list(aliases)
        self.graph = out  # holds what the backward pass reads
        self.out, self.grad = out.detach(), torch.empty_like(out)
        sources = [x for x in self.inputs if x.requires_grad]
        with _record(self.backward):
            wanted = [*sources, *aliases.values()]
            grads: list[Any] = list(
                torch.autograd.grad(out, wanted, self.grad, retain_graph=True, allow_unused=True)
            )
            found = {id(x): grads.pop(0) for x in sources}
            for i, alias in enumerate(aliases.values()):
                total = main_grad(alias)
                if total is not None:
                    if not alias.grad_added_to_main_grad and grads[i] is not None:
                        total.add_(grads[i])
                    grads[i] = None
        self.grads = [found.get(id(x)) for x in self.inputs]
        self.parameter_grads = grads
        """None where the recording adds to ``main_grad``."""

    def is_busy(self) -> bool:
        """Whether a forward pass waits for its backward pass."""
        return self.running is not None and self.running() is not None


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recording: _Recording, *tensors: Tensor) -> Tensor:
        _fill(recording.inputs, tensors[: len(recording.inputs)])
        recording.forward.replay()
        ctx.recording, ctx.alive = recording, _Pass()
        recording.running = weakref.ref(ctx.alive)
        return recording.out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        recording: _Recording = ctx.recording
        _fill([recording.grad], (grad,))
        recording.backward.replay()
        ctx.alive, recording.running = None, None
        grads = [None if g is None else g.detach() for g in recording.grads]
        pairs = zip(recording.parameters, recording.parameter_grads, strict=True)
        return None, *grads, *(added(p) if g is None else g.clone() for p, g in pairs)


def _fill(places: list[Tensor], values: tuple[Tensor, ...]) -> None:
    """Copy what does not lie in its place already."""
    with torch.no_grad():
        for place, value in zip(places, values, strict=True):
            if place.data_ptr() != value.data_ptr():
                place.copy_(value)


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


def _record(graph: torch.cuda.CUDAGraph) -> Any:
    # other threads, which bring batches, may go on
    return torch.cuda.graph(graph, pool=_pool(), capture_error_mode="thread_local")


@cache
def _pool() -> Any:
    """Memory of all recordings: replayed one after another, they share what none keeps."""
    return torch.cuda.graph_pool_handle()
