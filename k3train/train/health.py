"""Whether this node's GPUs can be used again after a failure."""

from __future__ import annotations


def unhealthy() -> str:
    """Why this node must not be used again, or "" when nothing speaks against it.

    Asks nvidia-resiliency-ext, where it is installed and the driver can tell, whether a GPU needs a reset.
    """
    try:
        from nvidia_resiliency_ext.shared_utils.health_check import (  # pyright: ignore[reportMissingImports]
            GPUHealthCheck,
        )
    except ImportError:
        return ""
    check = GPUHealthCheck()
    return "" if not check.enabled or check() else "a GPU needs a reset (nvidia-resiliency-ext)"
