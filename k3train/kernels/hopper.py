"""Whether kernels written for Hopper can run here."""

from __future__ import annotations

import importlib.util
import os
import re
from functools import lru_cache
from pathlib import Path

import torch

OLDEST_PTXAS = (13, 1)
"""Older assemblers reuse the operand registers of a running wgmma: wrong results and invalid addresses."""


@lru_cache
def is_hopper(where: torch.device | str) -> tuple[bool, str]:
    """Whether such kernels run on a device, and the reason when they do not."""
    device = torch.device(where)
    if device.type != "cuda" or not torch.cuda.is_available():
        return False, f"it needs a CUDA device, the tensors are on {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        name = torch.cuda.get_device_name(device)
        return False, f"it is written for compute capability 9.0 (H100, H200), {name} has {capability}"
    return _assembler()


@lru_cache(maxsize=1)
def _assembler() -> tuple[bool, str]:
    """Whether ptxas compiles Hopper's matrix instructions correctly; takes the PyPI wheel's if it is
    there."""
    if importlib.util.find_spec("triton") is None:
        return False, "triton is not installed"
    if "TRITON_PTXAS_PATH" not in os.environ and (found := _wheel_ptxas()):
        os.environ["TRITON_PTXAS_PATH"] = str(found)
    from triton import knobs

    ptxas = knobs.nvidia.ptxas
    version = tuple(int(n) for n in re.findall(r"\d+", ptxas.version)[:2])
    if version < OLDEST_PTXAS:
        need = ".".join(map(str, OLDEST_PTXAS))
        return False, (
            f"ptxas {ptxas.version} ({ptxas.path}) miscompiles Hopper's asynchronous matrix instructions; "
            f"install the PyPI package nvidia-cuda-nvcc>={need} or set TRITON_PTXAS_PATH to a newer one"
        )
    return True, ""


def _wheel_ptxas() -> Path | None:
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations if spec and spec.submodule_search_locations else ():
        for path in sorted(Path(root).glob("cu*/bin/ptxas"), reverse=True):
            if os.access(path, os.X_OK):
                return path
    return None
