"""Fixtures and hooks for every test."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("COLUMNS", None)  # of a terminal that no test has

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
# Tests share few cores with others: how long an example takes says nothing.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(1234)


@pytest.fixture(autouse=True)
def _poisoned_gpu_memory(request: pytest.FixtureRequest) -> None:
    """On a GPU new tensors lie where every number is NaN, so that what a kernel leaves unwritten is seen."""
    if request.node.get_closest_marker("gpu") and torch.cuda.is_available():
        torch.cuda.empty_cache()
        sizes = [1 << 28] + [
            1 << 17
        ] * 64  # of both pools of torch's allocator, which keeps what is freed here
        held = [torch.full((size,), -1, dtype=torch.int32, device="cuda") for size in sizes]
        del held
