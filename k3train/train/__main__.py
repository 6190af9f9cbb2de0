"""One rank of a run: ``torchrun --nproc-per-node N -m k3train.train runs/<name>/run.yaml``."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from k3train.backend.start import end_process, seed_everything, start_backend, start_processes
from k3train.config.compose import load_resolved
from k3train.config.problems import ConfigError
from k3train.train.signals import EXIT_BAD_INPUT, EXIT_ENVIRONMENT, EXIT_UNEXPECTED


def main(arguments: list[str]) -> int:
    """Train the run that ``arguments[0]``, a resolved configuration, describes; returns the exit code."""
    if len(arguments) != 1:
        print("usage: python -m k3train.train <resolved run.yaml>", file=sys.stderr)
        return EXIT_BAD_INPUT
    try:
        run = load_resolved(Path(arguments[0]))
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return EXIT_BAD_INPUT
    try:
        device = start_backend(run.device, threads=run.cluster.threads_per_rank)
        start_processes(device, timeout_seconds=run.cluster.collective_timeout_seconds)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return EXIT_ENVIRONMENT
    seed_everything(run.seed)
    return _train(run, device)


def _train(run, device) -> int:
    # These import megatron-core, which must find the backend ready.
    from k3train.data.corpus import CorpusError
    from k3train.train.loop import train
    from k3train.train.step import TrainingError

    try:
        return train(run, device)
    except (ConfigError, CorpusError) as error:
        code, message = EXIT_BAD_INPUT, str(error)
    except TrainingError as error:
        code, message = EXIT_UNEXPECTED, str(error)
    except Exception:
        code, message = EXIT_UNEXPECTED, traceback.format_exc()
    rank = os.environ["RANK"]
    # Each rank finds most errors at the same moment; the first rank speaks for all of them.
    if rank == "0" or code == EXIT_UNEXPECTED:
        print(f"rank {rank}: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
