"""Whether this machine can run the ranks of a run, found out before one starts."""

from __future__ import annotations

from k3train.backend.start import wants_gpus
from k3train.config.schema import Run
from k3train.kernels import fp8


def check_machine(run: Run) -> None:
    """Raise Unavailable when this machine has no GPU for a rank of ``run`` that needs one, or cannot multiply
    as ``model.fp8`` says."""
    wants_gpus(run.device, run.cluster.ranks_per_node)
    fp8.check_machine(run.model.fp8)
