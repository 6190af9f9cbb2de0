"""Whether a checkpoint belongs to the run that would go on from it: same settings, same text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from k3train.config.build import Builder, to_plain
from k3train.config.compare import compare, identity_problems
from k3train.config.problems import ConfigError
from k3train.config.schema import Run
from k3train.data.indexed import CorpusError
from k3train.train.progress import Progress
from k3train.train.setup import StageSetup


def train_state(setup: StageSetup, progress: Progress) -> dict[str, Any]:
    """What a checkpoint keeps besides tensors, as JSON data."""
    return {
        **progress.to_json(),
        "stage": setup.plan.name,
        "settings": to_plain(setup.run),
        "data": {
            "fingerprint": setup.data.fingerprint(),
            "corpora": _corpora(setup),
            "consumed_tokens": setup.data.consumed(progress.step - setup.plan.start_step),
        },
    }


def check_settings(run: Run, state: dict[str, Any], checkpoint: Path) -> None:
    """Raise ConfigError when ``checkpoint`` was trained with another model, seed, data or stages.

    run.yaml tells the same, but it can be lost or edited; the checkpoint cannot.
    """
    builder = Builder()
    trained = builder.build(state.get("settings"))
    if builder.problems:  # kept by a version with other settings
        return
    identity, _ = compare(trained, run, trained_steps=state["step"])
    if identity:
        raise ConfigError(identity_problems(identity, checkpoint))


def check_text(setup: StageSetup, state: dict[str, Any] | None) -> None:
    """Raise CorpusError, on every rank, when a rank sees other text than rank 0, or than the checkpoint whose
    state this is was trained on. Every rank must call this."""
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, setup.data.fingerprint())
    other = [rank for rank, fingerprint in enumerate(seen) if fingerprint != seen[0]]
    if other:
        raise CorpusError(
            f"rank {other[0]} sees other corpora or settings than rank 0: give all nodes the same files."
        )
    trained = {} if state is None else state.get("data", {}).get("corpora", {})
    for name, fingerprint in _corpora(setup).items():
        if trained.get(name, fingerprint) != fingerprint:
            raise CorpusError(
                f"data.sources.{name}: {setup.run.data.sources[name].path} is not the text that this run was "
                "trained on; restore it, or start another run with another name."
            )


def _corpora(setup: StageSetup) -> dict[str, str]:
    """Hash of the text of each source that the stage draws from."""
    return {name: source["corpus"] for name, source in setup.data.inputs()["sources"].items()}
