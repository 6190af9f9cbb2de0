"""Runs a function on several real gloo ranks, forked from the warm test process.

Forking shares the imports of torch and megatron-core: four ranks start in 0.3 s instead of 18 s. A file store
replaces ports, so tests cannot race for one. The parent never starts CUDA or a process group itself.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # torch's optimizers import it at first use, which every rank would pay for

from k3train.backend import start
from k3train.config.schema import Device
from tests.patience import PATIENCE

if not torch.cuda.is_available():
    # On a GPU machine the bridge would take the GPU away from the tests marked ``gpu``.
    start.start_backend(Device.cpu, threads=1)


class RanksFailed(AssertionError):
    """A rank failed or ran too long; the message holds the first tracebacks."""


def run_ranks(n: int, function: Callable[..., Any], *args: Any, timeout: float = PATIENCE) -> list[Any]:
    """``[function(rank, *args) for rank in range(n)]``, each on its own rank of a gloo world of ``n``.

    The first rank that fails ends the others; its traceback is raised here. Results travel through
    ``torch.save``, so tensors are fine. Skips the test on a machine with a GPU, whose process must not fork.
    """
    if torch.cuda.is_available():
        pytest.skip("gloo ranks are tested on machines without a GPU")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        pids = {_fork(rank, n, function, args, Path(folder)): rank for rank in range(n)}
        _wait(pids, Path(folder), timeout)
        return [torch.load(Path(folder, f"{rank}.result"), weights_only=False) for rank in range(n)]


def _fork(rank: int, n: int, function: Callable[..., Any], args: tuple, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n))
        start.start_processes(
            torch.device("cpu"), timeout_seconds=int(PATIENCE), init_method=f"file://{folder}/store"
        )
        start.seed_everything(1234)
        torch.save(function(rank, *args), folder / f"{rank}.result")
        torch.distributed.barrier()
        code = 0
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
    start.end_process(code)
    raise AssertionError("end_process returned")


def _wait(pids: dict[int, int], folder: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    running = dict(pids)
    failed: str | None = None
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            rank = running.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            if code and failed is None:
                failed = f"rank {rank} ended with {code}"
                time.sleep(0.3)  # lets the rank that failed first write its traceback
                _kill(running)
        elif time.monotonic() > deadline:
            failed = failed or f"ranks {sorted(running.values())} still ran after {timeout} s"
            _kill(running)
            deadline = float("inf")
        else:
            time.sleep(0.005)
    if failed is not None:
        errors = sorted(folder.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
        raise RanksFailed("\n".join([failed, *(f"--- {e.stem}\n{e.read_text()}" for e in errors[:2])]))


def _kill(pids: dict[int, int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
