"""Starts one node's ranks, meets the other nodes, and starts again after a failure: torchrun with our policy.

torchrun ends with 1 whatever its ranks ended with, and 30 seconds after SIGTERM it kills them, saved or not.
Here a signal makes the run's stop file, which the ranks look for, and exit code 75 ("stopped, start again")
reaches the batch script. launch/slurm.py renders the call; every node of the job makes it once.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from torch.distributed.launcher.api import LaunchConfig

from k3train.train.supervisor import NO_LOGS, Policy, supervise


def main(arguments: list[str]) -> int:
    """Run the Python command line after ``--`` once per rank; returns the exit code that tells most."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, required=True, help="nodes of the job")
    parser.add_argument("--min-nodes", type=int, help="nodes with which it may go on; default: all")
    parser.add_argument("--ranks", type=int, required=True, help="ranks on this node")
    parser.add_argument(
        "--node", type=int, required=True, help="number of this node, from 0; 0 is the meeting point"
    )
    parser.add_argument("--endpoint", required=True, help="host:port where the nodes meet, on node 0")
    parser.add_argument("--id", required=True, help="a name that only this start of the job has")
    parser.add_argument("--stop-file", type=Path, required=True, help="file that asks the ranks to stop")
    parser.add_argument("--max-restarts", type=int, default=0, help="failures in a row that are forgiven")
    parser.add_argument("--restart-delay", type=float, default=1.0, help="seconds before the first restart")
    parser.add_argument("--last-call", type=int, default=30, help="seconds to wait for more than --min-nodes")
    parser.add_argument("command", nargs="+", help="what each rank gives to Python, after --")
    options = parser.parse_args(arguments)
    config = LaunchConfig(
        min_nodes=min(options.min_nodes or options.nodes, options.nodes),
        max_nodes=options.nodes,
        nproc_per_node=options.ranks,
        run_id=options.id,
        rdzv_backend="c10d",
        rdzv_endpoint=options.endpoint,
        rdzv_configs={
            "is_host": options.node == 0,
            "timeout": 900,
            "last_call_timeout": options.last_call,
        },
        local_addr=os.environ.get("SLURMD_NODENAME"),
        logs_specs=NO_LOGS,
    )
    policy = Policy(
        run_dir=options.stop_file.parent,
        stop_file=options.stop_file,
        max_restarts=options.max_restarts,
        delay_seconds=options.restart_delay,
    )
    return supervise(config, sys.executable, "-u", *options.command, policy=policy)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
