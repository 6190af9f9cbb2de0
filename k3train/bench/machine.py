"""What a benchmark ran on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import torch

PACKAGES = ("torch", "triton", "megatron-core", "fla-core", "nemo-automodel", "numpy", "transformers")


def version(package: str) -> str | None:
    """Installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine(device: torch.device) -> dict[str, Any]:
    """Device, processor and the versions that decide over speed."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        **{name: number for name in PACKAGES if (number := version(name))},
        "torch": torch.__version__,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "processors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "ptxas": assembler(),
        }
    return found | ({} if "device" in found else {"device": "cpu"})


def assembler() -> str:
    """Version of the assembler that Triton uses, after a look for one that compiles Hopper code correctly."""
    from k3train.kernels.kda.triton_kda import is_available

    is_available("cuda", torch.bfloat16, 128, -5.0)
    from triton import knobs

    return knobs.nvidia.ptxas.version
