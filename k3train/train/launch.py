"""Starts the ranks of a run on this machine, through torch's elastic agent."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from k3train.config.schema import Run
from k3train.train.signals import (
    EXIT_BAD_INPUT,
    EXIT_DONE,
    EXIT_ENVIRONMENT,
    EXIT_STOPPED,
    EXIT_UNEXPECTED,
    STOP_FILE,
)


def launch(run: Run, resolved: Path) -> int:
    """Run ``python -m k3train.train resolved`` on every rank of this machine; returns the run's exit code.

    SIGINT and SIGTERM make the stop file, so that the ranks save and end by themselves: the agent's own
    handling would kill them 30 seconds later whether they had saved or not. A second signal does just that.
    """
    stop_file = Path(run.dir) / STOP_FILE
    stop_file.unlink(missing_ok=True)
    asked = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        print("stopping after this step; once more stops at once", file=sys.stderr, flush=True)
        stop_file.touch()

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            # A rank that stops or fails says so itself; the agent's report adds only its own stack.
            logging.getLogger(name).setLevel(logging.CRITICAL)
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
        max_restarts=0,
        start_method="spawn",
        signals_to_handle="SIGQUIT",
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "k3train.train", str(resolved))
    except ChildFailedError as failure:
        return _exit_code(failure)
    except KeyboardInterrupt:
        return EXIT_UNEXPECTED
    return EXIT_DONE


def _exit_code(failure: ChildFailedError) -> int:
    """The code that tells most: a rank's own code if it ended by itself, else 1."""
    codes = [child.exitcode for child in failure.failures.values()]
    if all(code == EXIT_STOPPED for code in codes):
        return EXIT_STOPPED
    own = [code for code in codes if code > 0 and code != EXIT_STOPPED]
    if any(code in (EXIT_BAD_INPUT, EXIT_ENVIRONMENT) for code in own):
        return own[0]  # the agent has ended the others
    for rank, child in failure.failures.items():
        if child.exitcode < 0:
            name = signal.Signals(-child.exitcode).name
            print(
                f"rank {rank} was ended by {name}; start again to go on from the last checkpoint",
                file=sys.stderr,
            )
    return own[0] if own else EXIT_UNEXPECTED
