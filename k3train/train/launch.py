"""Starts the ranks of a run on this machine, and again after a failure."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.launcher.api import LaunchConfig

from k3train.config.schema import Run
from k3train.faults import plan_from_environment
from k3train.train.claim import STOP_FILE
from k3train.train.signals import END_TIME
from k3train.train.supervisor import NO_LOGS, Policy, supervise


def launch(
    run: Run,
    resolved: Path,
    *,
    forked: Callable[..., Any] | None = None,
    arguments: tuple[Any, ...] = (),
    logs: LogsSpecs | None = None,
) -> int:
    """Run ``python -m k3train.train resolved`` on every rank of this machine; returns the run's exit code.

    With ``forked``, each rank is that function of ``arguments`` in a process forked from a warm server
    instead; ``logs`` says where ranks' output goes. Raises BadInput for a fault plan that means nothing.
    """
    plan_from_environment()
    stop_file = Path(run.dir) / STOP_FILE
    stop_file.unlink(missing_ok=True)
    if run.cluster.time_limit_minutes:  # from this start on, however often ranks are started again
        os.environ[END_TIME] = str(int(time.time()) + 60 * run.cluster.time_limit_minutes)
    os.environ.setdefault("OMP_NUM_THREADS", str(run.cluster.threads_per_rank))
    # As `torchrun --standalone`: the agent's own store, on a port that the system picks while binding it.
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=run.cluster.ranks_per_node,
        run_id=run.name.replace("/", "-"),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        start_method="forkserver" if forked else "spawn",
        logs_specs=logs or NO_LOGS,
    )
    policy = Policy(
        run_dir=Path(run.dir),
        stop_file=stop_file,
        max_restarts=run.cluster.max_restarts,
        delay_seconds=run.cluster.restart_delay_seconds,
    )
    if forked is not None:
        return supervise(config, forked, *arguments, policy=policy)
    return supervise(config, sys.executable, "-u", "-m", "k3train.train", str(resolved), policy=policy)
