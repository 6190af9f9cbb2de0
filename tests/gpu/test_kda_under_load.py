"""KDA's gradients while other processes use the same GPU: a kernel is halted anywhere, for milliseconds."""

from __future__ import annotations

import time

import pytest
import torch
import torch.multiprocessing as mp

from tests.gpu import run_kda as run

pytestmark = [pytest.mark.gpu]

PROCESSES, SECONDS = 4, 15.0
BORDERS = (0, 1139, 1402, 1749, 1990, *range(2048, 32769, 2048))


def _repeat(index: int, results: mp.SimpleQueue) -> None:
    x = run.make(1, BORDERS[-1], 4, "slow", seed=index)
    do = torch.randn(1, BORDERS[-1], 4, 128, device="cuda").to(torch.bfloat16)
    want, passes, wrong, began = None, 0, 0, time.monotonic()
    while time.monotonic() - began < SECONDS:
        o, _, g = run.gradients(run.ours, x, do, borders=BORDERS)
        torch.cuda.synchronize()  # the GPU goes to another process here
        if want is None:
            want, began = [o, *g], time.monotonic()
        passes += 1
        wrong += not all(torch.equal(a, b) for a, b in zip([o, *g], want, strict=True))
    results.put((passes, wrong))


def test_gradients_repeat_beside_other_processes() -> None:
    from k3train.kernels.kda.triton_kda import is_available

    works, reason = is_available("cuda", torch.bfloat16, 128, run.BOUND)
    if not works:
        pytest.skip(reason)
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    others = [context.Process(target=_repeat, args=(i, results)) for i in range(PROCESSES)]
    for process in others:
        process.start()
    for process in others:
        process.join()
    assert all(process.exitcode == 0 for process in others)
    found = [results.get() for _ in others]
    assert all(passes > 10 for passes, _ in found), found
    assert not any(wrong for _, wrong in found), found
