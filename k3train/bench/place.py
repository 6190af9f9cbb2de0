"""Where a benchmark runs and what a contender hands over to be timed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from k3train.config import schema

if TYPE_CHECKING:
    from k3train.model.config import K3Config
    from k3train.parallel.groups import Groups
    from k3train.parallel.layout import Layout


class Cannot(Exception):
    """This contender has nothing to measure here; the message says why, in a few words."""


@dataclass(kw_only=True)
class Place:
    """The device of one process, its dtype and its random numbers."""

    device: torch.device
    compiling: bool = False
    """Whether the calls only fill the compiler's caches: then smaller is better."""

    @property
    def dtype(self) -> torch.dtype:
        """Of activations: bf16 on a GPU; on the CPU, where bf16 products are slow, fp32."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @cached_property
    def generator(self) -> torch.Generator:
        """The same numbers in every process."""
        return torch.Generator(device=self.device).manual_seed(0)

    def randn(
        self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None, grad: bool = True
    ) -> Tensor:
        """Normal numbers in the activations' dtype or in ``dtype``; a leaf of the graph if ``grad``."""
        x = torch.randn(*shape, device=self.device, generator=self.generator) * scale
        return x.to(dtype or self.dtype).requires_grad_(grad)

    def needs_gpu(self, who: str) -> None:
        """Raise Cannot on the CPU."""
        if self.device.type != "cuda":
            raise Cannot(f"{who} runs on GPUs only")


@dataclass(kw_only=True)
class Case:
    """Calls to be timed."""

    forward: Callable[[], Any]
    """Timed without gradients."""
    both: Callable[[], Any]
    """Forward and backward."""
    parts: dict[str, Callable[[], Any]] = field(default_factory=dict)
    """More calls, by what the table calls them, without gradients."""
    trained: dict[str, Callable[[], Callable[[], Any]]] = field(default_factory=dict)
    """More calls, with gradients, each made by a function after the calls above are done."""
    routing: str = ""
    note: str = ""


@dataclass(kw_only=True, slots=True)
class Alone:
    """A world of one rank."""

    config: K3Config
    layout: Layout
    groups: Groups


def prepare(device: torch.device) -> None:
    """Settle what holds for every contender's process, before anything uses the device."""
    if device.type == "cuda":
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as in training
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)


@cache
def world(device: torch.device) -> Any:
    """A process group of this process alone, with megatron-core made ready for the device."""
    from k3train.backend.start import start_backend, start_processes

    start_backend(schema.Device.cuda if device.type == "cuda" else schema.Device.cpu)
    if not dist.is_initialized():
        start_processes(device, timeout_seconds=600)
    return dist.group.WORLD


def alone(model: schema.Model, device: torch.device) -> Alone:
    """Groups and megatron-core's configuration of ``model`` on one rank."""
    world(device)
    from k3train.model.config import make_config
    from k3train.parallel.layout import make_layout

    parallel = schema.Parallel()
    layout = make_layout(model, parallel, 1)
    return Alone(config=make_config(model, parallel, layout), layout=layout, groups=_groups())


@cache
def _groups() -> Groups:
    """Those of one rank, whatever the model."""
    from k3train.parallel.groups import start_groups
    from k3train.parallel.layout import make_layout

    return start_groups(make_layout(schema.Model(), schema.Parallel(), 1), seed=0)


def gradients(outputs: Tensor, inputs: list[Tensor], grad: Tensor | None = None) -> tuple[Tensor, ...]:
    """Gradients of ``inputs`` for the gradient ``grad`` of ``outputs``; without one, of their sum."""
    return torch.autograd.grad(outputs, inputs, torch.ones_like(outputs) if grad is None else grad)
