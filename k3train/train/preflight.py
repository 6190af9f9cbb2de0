"""What would end every rank as soon as it starts, found out before one does and before a folder is made."""

from __future__ import annotations

from pathlib import Path

from k3train.backend.start import wants_gpus
from k3train.checkpoint.fit import misfit
from k3train.checkpoint.manifest import CheckpointError, check_sizes, read_manifest
from k3train.checkpoint.trust import check_trusted
from k3train.config.problems import ConfigError, ConfigProblem
from k3train.config.schema import Run
from k3train.config.trained import last_trained, settings_of
from k3train.kernels import fp8


def check_start(run: Run) -> None:
    """Raise Unavailable when this machine has no GPU for a rank of ``run`` that needs one, or cannot multiply
    as ``model.fp8`` says, and ConfigError when ``checkpoint.load_from`` names nothing that the run can begin
    with."""
    wants_gpus(run.device, run.cluster.ranks_per_node)
    fp8.check_machine(run.model.fp8)
    if run.checkpoint.load_from is not None and not last_trained(Path(run.dir)).steps:
        _check_weights(run, run.checkpoint.load_from)


def _check_weights(run: Run, start_from: str) -> None:
    path = Path(start_from)
    why = None
    try:
        check_trusted(path)
        check_sizes(path, read_manifest(path))
    except CheckpointError as error:
        fix = "Give a checkpoint's folder, such as runs/NAME/checkpoints/step_00000100"
        why = f"cannot be loaded: {error}", fix
    if why is None and (settings := settings_of(path)) is not None:
        why = misfit(settings.model, run.model)
    if why is not None:
        raise ConfigError([ConfigProblem("checkpoint.load_from", start_from, *why, "checkpoint.load-from")])
