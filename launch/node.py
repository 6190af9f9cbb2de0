"""Starts one node's ranks and meets the other nodes: torchrun, except that the ranks' exit code survives.

torchrun ends with 1 whatever its ranks ended with, and 30 seconds after SIGTERM it kills them, saved or not.
Here a signal makes the run's stop file, which the ranks look for, and exit code 75 ("stopped, start again")
reaches the batch script. launch/slurm.py renders the call; every node of the job makes it once.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

STOPPED = 75


def main(arguments: list[str]) -> int:
    """Run the Python command line after ``--`` once per rank; returns the exit code that tells most."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, required=True, help="nodes of the job")
    parser.add_argument("--ranks", type=int, required=True, help="ranks on this node")
    parser.add_argument(
        "--node", type=int, required=True, help="number of this node, from 0; 0 is the meeting point"
    )
    parser.add_argument("--endpoint", required=True, help="host:port where the nodes meet, on node 0")
    parser.add_argument("--id", required=True, help="a name that only this start of the job has")
    parser.add_argument("--stop-file", type=Path, required=True, help="file that asks the ranks to stop")
    parser.add_argument("command", nargs="+", help="what each rank gives to Python, after --")
    options = parser.parse_args(arguments)

    stop_on_signals(options.stop_file)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    config = LaunchConfig(
        min_nodes=options.nodes,
        max_nodes=options.nodes,
        nproc_per_node=options.ranks,
        run_id=options.id,
        rdzv_backend="c10d",
        rdzv_endpoint=options.endpoint,
        rdzv_configs={"is_host": options.node == 0, "timeout": 900},
        local_addr=os.environ.get("SLURMD_NODENAME"),
        max_restarts=0,
        start_method="spawn",
        signals_to_handle="SIGQUIT",
    )
    try:
        elastic_launch(config, sys.executable)("-u", *options.command)
    except ChildFailedError as failure:
        return exit_code([child.exitcode for child in failure.failures.values()])
    except KeyboardInterrupt:
        return 1
    return 0


def stop_on_signals(stop_file: Path) -> None:
    """Make SIGTERM and SIGINT ask the ranks to stop; a second one ends them at once."""
    asked = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        stop_file.touch()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)


def exit_code(codes: list[int]) -> int:
    """75 when every rank that failed says so, else the first other code of a rank's own, else 1 (killed)."""
    if codes and all(code == STOPPED for code in codes):
        return STOPPED
    return next((code for code in codes if code > 0 and code != STOPPED), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
