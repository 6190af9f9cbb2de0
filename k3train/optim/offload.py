"""AdamW on the host (ZeRO-Offload): state and update beside the CPU, parameters and gradients on the GPU.

DeepSpeed compiles its CPU Adam for the machine's own instructions when it is first used there.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3train.config.problems import Unavailable

_LONGEST_BUILD_SECONDS = 1200
"""A lock that is older was left by a build that was killed."""
_OR_NOT = "or set optim.offload=none"


class HostAdam:
    """The inner optimizer of a megatron-core DistributedOptimizer: DeepSpeed's AdamW over host memory.

    ``param_groups`` hold this rank's flat slices of the parameters themselves, bf16 or fp32 and on the
    rank's device, with their reduced fp32 gradient as ``decoupled_grad``. For each, the host has fp32 master
    weights and moments of the slice's length. Gradients come through two rooms, each as large as the largest
    slice: while one is used the other is filled.
    """

    factor: float = 1.0
    """What gradients are multiplied by, where they lie, before a step fetches them."""

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        """Raises Unavailable where DeepSpeed's Adam cannot be had."""
        self.param_groups = param_groups
        slices = [each for group in param_groups for each in group["params"]]
        self.on_gpu = any(each.is_cuda for each in slices)
        self.masters: dict[Any, Tensor] = {
            each: each.detach().to("cpu", torch.float32, copy=True) for each in slices
        }
        """fp32 master weights on the host, by slice."""
        largest = max((each.numel() for each in slices), default=0)
        self._rooms = [torch.empty(largest, pin_memory=self.on_gpu) for _ in range(2)]
        self._adam = host_adam()(
            [{"params": list(self.masters.values())}], adamw_mode=True, bias_correction=False
        )

    @property
    def state(self) -> Any:
        """Moments by master weight."""
        return self._adam.state

    def allocate(self) -> None:
        """Make the moments of every slice, as zeros, where they do not exist yet."""
        for master in self.masters.values():
            if "exp_avg" not in self.state[master]:
                moments = {key: torch.zeros_like(master) for key in ("exp_avg", "exp_avg_sq")}
                self.state[master].update(step=0, **moments)

    def close(self) -> None:
        """Give back the rooms, after which there is no step."""
        self._rooms.clear()

    @torch.no_grad()
    def reload(self) -> None:
        """Make master weights of the parameters as they are now."""
        for each, master in self.masters.items():
            master.copy_(each)

    @torch.no_grad()
    def step(self) -> None:
        """Fetch the gradients, update the master weights, and write them back, rounded, as parameters."""
        self.allocate()
        work: list[tuple[Any, dict[str, Any]]] = []
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
                work += [(each, _corrected(group)) for each in group["params"]]
        ready = [self._fetch(i, each) for i, (each, _) in enumerate(work[:2])]
        for i, (each, settings) in enumerate(work):
            if self.on_gpu:
                ready[i].synchronize()
            room, master = self._rooms[i % 2][: each.numel()], self.masters[each]
            self._update(master, room, settings)
            # The gradient has been used: its room takes what goes back.
            each.copy_(room.view(each.dtype)[: each.numel()].copy_(master), non_blocking=True)
            if i + 2 < len(work):  # after the copy that has just been queued has read the room
                ready.append(self._fetch(i + 2, work[i + 2][0]))

    def _fetch(self, i: int, each: Any) -> Any:
        """Fill a room with a slice's gradient; on a GPU, the event after which it is there."""
        gradient = each.decoupled_grad
        if self.factor != 1.0:
            gradient.mul_(self.factor)
        self._rooms[i % 2][: each.numel()].copy_(gradient, non_blocking=True)
        return torch.cuda.current_stream().record_event() if self.on_gpu else None

    def _update(self, master: Tensor, gradient: Tensor, settings: dict[str, Any]) -> None:
        (inner,) = self._adam.param_groups
        inner.update(settings, params=[master])
        master.grad = gradient
        self._adam.step()
        master.grad = None


def _corrected(group: dict[str, Any]) -> dict[str, Any]:
    """Settings that make AdamW without bias correction take the step of AdamW with it.

    DeepSpeed's own correction is a product that grows by a factor a step in fp32, and a power after a
    restart: a run that was resumed would round differently from one that was not. With c1 = 1 - beta1^t and
    c2 = 1 - beta2^t, rate * (m / c1) / (sqrt(v / c2) + eps) is
    (rate * sqrt(c2) / c1) * m / (sqrt(v) + eps * sqrt(c2)).
    """
    (beta1, beta2), step = group["betas"], group["step"]
    scale = math.sqrt(1.0 - beta2**step) / (1.0 - beta1**step)
    return {
        "betas": (beta1, beta2),
        "lr": group["lr"] * scale,
        "weight_decay": group["weight_decay"] / scale,  # is multiplied by lr
        "eps": group["eps"] * math.sqrt(1.0 - beta2**step),
    }


def host_adam() -> Any:
    """DeepSpeed's class DeepSpeedCPUAdam, its program built and loaded.

    The first call on a machine compiles for minutes; others wait for it meanwhile. Raises Unavailable, in one
    sentence, when the package, a compiler or ninja is missing, or the build fails.
    """
    # Its other devices look for CUDA's compiler, which its CPU Adam has no use for.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Importing it would make torch ask another library for GPUs from then on.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "0")
    # What it says while it builds is said in one sentence when it fails.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    scripts = sysconfig.get_path("scripts")  # where pip puts ninja, whether or not the environment is active
    if scripts not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), scripts])
    try:
        from deepspeed.ops import adam, op_builder  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise Unavailable(
            "optim.offload=cpu updates with DeepSpeed's CPU Adam, and the package deepspeed cannot be "
            f"imported ({error}): pip install 'k3train[deepspeed]', {_OR_NOT}"
        ) from error
    builder: Any = vars(op_builder)["CPUAdamBuilder"]()  # made when it is imported
    _wait_for_others(builder.NAME)
    try:
        builder.load(verbose=False)
    except Exception as error:  # a compiler fails in any way
        raise Unavailable(_why_not_built(error)) from error
    return adam.DeepSpeedCPUAdam


def _wait_for_others(name: str) -> None:
    """Until no other process builds; torch itself would wait for ever for one that was killed."""
    from torch.utils.cpp_extension import _get_build_directory

    lock = Path(_get_build_directory(name, False)) / "lock"
    while (began := _modified(lock)) is not None:
        if time.time() - began > _LONGEST_BUILD_SECONDS:
            raise Unavailable(
                f"{lock} is left from a build of DeepSpeed's CPU Adam that was killed: delete it"
            )
        time.sleep(0.2)


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None


def _why_not_built(error: Exception) -> str:
    start = "optim.offload=cpu updates with DeepSpeed's CPU Adam (extra: deepspeed), which is compiled here"
    compiler = os.environ.get("CXX", "c++")
    for program, package in ((compiler, "g++"), ("ninja", "ninja-build")):
        if shutil.which(program) is None:
            return f"{start}, and there is no {program}: install it (Debian, Ubuntu: {package}), {_OR_NOT}"
    root = error.__cause__ or error
    reason = next((line for line in str(root).splitlines() if "error" in line.lower()), str(root))
    return f"{start} with {compiler}, which failed ({reason.strip()}): mend that, {_OR_NOT}"
