"""Median times of single calls, the memory they take, and the two ceilings of the machine."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

WARM_UPS = 2
LEAST, MOST = 5, 60
"""Timed calls."""
COLD_BYTES = 256 * 2**20
"""Written between two calls on a GPU, so that a call does not find its inputs in the L2 cache."""
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Milliseconds of single calls, and their memory."""

    ms: float
    """Median."""
    low: float
    """First quartile."""
    high: float
    """Third quartile."""
    repeats: int
    peak_gib: float
    """Most memory held, inputs included; on the CPU, by the process since its start."""


def measure(call: Callable[[], Any], device: torch.device, *, seconds: float) -> Timing:
    """Time ``call`` for about ``seconds`` after warm-up calls, by device events on a GPU."""
    for _ in range(WARM_UPS):
        began = time.perf_counter()
        call()
        synchronize(device)
        once = time.perf_counter() - began
    repeats = max(LEAST, min(MOST, int(seconds / max(once, 1e-6))))
    times, peak = (_on_gpu if device.type == "cuda" else _on_cpu)(call, repeats)
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return Timing(ms=middle, low=low, high=high, repeats=repeats, peak_gib=peak / GIB)


def _on_cpu(call: Callable[[], Any], repeats: int) -> tuple[list[float], int]:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - began))
    return times, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _on_gpu(call: Callable[[], Any], repeats: int) -> tuple[list[float], int]:
    cold = torch.empty(COLD_BYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, stop in events:
        cold.zero_()
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - COLD_BYTES
    return [start.elapsed_time(stop) for start, stop in events], peak


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def give_back(device: torch.device) -> None:
    """Memory that nothing holds any more goes back to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def ceilings(device: torch.device) -> dict[str, float]:
    """GB/s of a large copy (bytes read and written) and TFLOP/s of a large matrix product.

    bf16 on a GPU; on the CPU fp32, as the rows are.
    """
    gpu = device.type == "cuda"
    x = torch.randint(256, (2**31 if gpu else 2**26,), dtype=torch.uint8, device=device)
    y = torch.empty_like(x)  # stays with x while products are timed: 4 GiB on a GPU
    copy = 2 * x.numel() / measure(lambda: y.copy_(x), device, seconds=0.25).ms / 1e6
    n = 8192 if gpu else 512
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16 if gpu else None) for _ in range(2))
    product = 2 * n**3 / measure(lambda: a @ b, device, seconds=0.25).ms / 1e9
    return {"copy_gb_s": copy, "matmul_tflop_s": product}
