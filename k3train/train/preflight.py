"""What a run must keep beyond its settings' rules, found out before a rank starts or a folder is made."""

from __future__ import annotations

from pathlib import Path

from k3train.checkpoint.fit import misfit
from k3train.checkpoint.listing import last_trained
from k3train.checkpoint.manifest import CheckpointError, check_sizes, read_manifest
from k3train.checkpoint.trust import check_trusted
from k3train.config.problems import ConfigError, ConfigProblem
from k3train.config.schema import Run
from k3train.config.trained import settings_of
from k3train.optim.memory import check_memory
from k3train.optim.rules import assignments


def check_run(run: Run) -> None:
    """Raise ConfigError when ``optim`` does not say what updates each parameter, when a stage does not fit
    its device's memory, and when ``checkpoint.load_from`` names nothing that the run can begin with.

    ``k3train check``, ``k3train train`` and every launcher call this. It needs no torch.
    """
    assignments(run.model, run.optim)
    check_memory(run)
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
