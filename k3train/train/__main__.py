"""One rank of a run: ``torchrun --nproc-per-node N -m k3train.train runs/<name>/run.yaml``."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from k3train.backend.start import end_process, seed_everything, start_backend, start_processes
from k3train.checkpoint.manifest import CheckpointFault
from k3train.config.compose import load_resolved
from k3train.config.problems import BadInput, ConfigError, ConfigProblem, Stopped, Unavailable
from k3train.config.schema import Run
from k3train.config.secrets import redacted_output
from k3train.faults import plan_from_environment
from k3train.train.claim import claimed
from k3train.train.failure import note_failure
from k3train.train.probe import check_launcher
from k3train.train.signals import EXIT_BAD_INPUT, EXIT_ENVIRONMENT, EXIT_UNEXPECTED

_FIRST_SPEAKS_SECONDS = 5.0


def main(arguments: list[str]) -> int:
    """Train the run that ``arguments[0]``, a resolved configuration, describes; returns the exit code."""
    if len(arguments) != 1:
        print("usage: python -m k3train.train <resolved run.yaml>", file=sys.stderr)
        return EXIT_BAD_INPUT
    with redacted_output():
        return _main(Path(arguments[0]))


def _main(resolved: Path) -> int:
    rank = os.environ.get("RANK", "0")
    try:
        check_launcher()
        run = load_resolved(resolved)
        plan_from_environment()
        run.cluster.nodes = _nodes(run, int(os.environ.get("WORLD_SIZE", "1")))
        with claimed(run) if rank == "0" else contextlib.nullcontext():
            return _train(run)
    except Unavailable as error:
        code, message = EXIT_ENVIRONMENT, str(error)
    except CheckpointFault as error:
        code, message = EXIT_UNEXPECTED, str(error)
    except BadInput as error:
        code, message = EXIT_BAD_INPUT, str(error)
    except OSError as error:
        code = EXIT_ENVIRONMENT
        message = f"{error.filename}: {error.strerror}" if error.filename else traceback.format_exc()
    except Stopped as error:
        code, message = error.exit_code, str(error)
    except Exception as error:
        code, message = EXIT_UNEXPECTED, describe(error)
        note_failure(resolved.parent, int(rank), error)
    if rank != "0" and code in (EXIT_BAD_INPUT, EXIT_ENVIRONMENT):
        # Each rank finds such an error at the same moment. The first speaks for all, and ends all.
        time.sleep(_FIRST_SPEAKS_SECONDS)
    print(f"rank {rank}: {message}", file=sys.stderr)
    return code


def describe(error: Exception) -> str:
    """What ended the rank: in a sentence if it is known, else the traceback; for the error being handled."""
    text = str(error).strip()
    # NCCL takes memory of its own, and says this when there is none.
    if isinstance(error, torch.OutOfMemoryError) or "error: out of memory" in text or "CUDA calloc" in text:
        smaller = "Lower curriculum.stages.<stage>.micro_batch_sequences, set parallel.recompute to full"
        return f"the GPU has no memory left: {text}\n{smaller}, or use more ranks (parallel.tp, pp, cp, ep)"
    if isinstance(error, dist.DistError) or "gloo/transport" in text:
        return f"the connection to another rank is lost: {text}"
    return traceback.format_exc()


def _nodes(run: Run, started: int) -> int:
    """Nodes that ``started`` ranks make: the run's, or fewer where it may go on without some.

    Raises ConfigError for any other number of ranks.
    """
    nodes, ranks = run.cluster.nodes, run.cluster.ranks_per_node
    found, rest = divmod(started, ranks)
    if rest or not (run.cluster.min_nodes or nodes) <= found <= nodes:
        rule = f"with cluster.nodes = {nodes} makes {nodes * ranks} ranks, but {started} were started"
        start = "k3train train" if nodes == 1 else "launch/slurm.py"
        fix = f"Start {nodes * ranks} (torchrun --nproc-per-node {ranks}), or change the run with {start}"
        raise ConfigError([ConfigProblem("cluster.ranks_per_node", ranks, rule, fix, "cluster.world")])
    if found < nodes and os.environ.get("RANK", "0") == "0":
        print(f"going on with {found} of {nodes} nodes, as cluster.min_nodes allows", file=sys.stderr)
    return found


def _train(run: Run) -> int:
    device = start_backend(run.device, threads=run.cluster.threads_per_rank)
    start_processes(device, timeout_seconds=run.cluster.collective_timeout_seconds)
    seed_everything(run.seed)
    # This imports megatron-core, which must find the backend ready.
    from k3train.train.identity import check_ranks_agree
    from k3train.train.loop import train
    from k3train.train.probe import check_device, check_folder, warn_of_shortages

    check_ranks_agree(run)
    check_device(run, device)
    check_folder(run)
    warn_of_shortages(run, device)
    return train(run, device)


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
