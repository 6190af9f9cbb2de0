"""What was found wrong with a step: as every rank knows it, and as a file of the run tells it."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from k3train.checkpoint.agree import on_first_rank
from k3train.checkpoint.manifest import write_durably
from k3train.config.problems import Stopped
from k3train.train.guards import Action
from k3train.train.progress import Progress
from k3train.train.rerun import Diagnosis
from k3train.train.setup import StageSetup
from k3train.train.signals import EXIT_BAD_STEP, EXIT_HARDWARE, EXIT_UNEXPECTED

logger = logging.getLogger(__name__)

RECORDS = "guards"
"""Folder in the run's folder with one file for each step that was found bad."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What is wrong with a step and what becomes of it; the same on every rank."""

    step: int
    """Its number, from 1 over the run."""
    kind: str
    """nonfinite, spike, replay, damage (state changed at rest) or replicas (they differ)."""
    action: Action
    message: str
    """What was found, as one sentence without a full stop."""
    record: Path
    """File with all that is known about the step, its documents among them."""
    diagnosis: Diagnosis | None
    """What computing it again has shown; None when that was not asked for."""
    suspects: list[int]
    """Ranks whose hardware is suspected."""

    @property
    def exit_code(self) -> int:
        """Of a run that ends for it."""
        if self.kind in ("damage", "replicas"):
            return EXIT_HARDWARE
        if self.diagnosis is None:
            return EXIT_UNEXPECTED
        return EXIT_HARDWARE if self.diagnosis.hardware else EXIT_BAD_STEP


class TrainingError(Stopped):
    """Training cannot go on; the message says why in one sentence."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(
            f"{verdict.message}. The run can go on from its last checkpoint; {verdict.record} tells more"
        )
        self.exit_code = verdict.exit_code


def record_verdict(
    setup: StageSetup,
    progress: Progress,
    kind: str,
    action: Action,
    message: str,
    details: dict[str, Any],
    diagnosis: Diagnosis | None = None,
    suspects: list[int] | None = None,
) -> Verdict:
    """The verdict on the step in progress, once its record is written. Every rank must call this.

    The record lists the documents of every sequence of the step, those of all ranks together.
    """
    step = progress.step + 1
    path = Path(setup.run.dir) / RECORDS / f"step_{step:08d}.json"

    def write() -> None:
        sequences = setup.data.documents(setup.plan.steps_done(progress.tokens))
        content = {
            "step": step,
            "stage": setup.plan.name,
            "tokens": progress.tokens,
            "kind": kind,
            "action": action.value,
            "found": message,
            **details,
            "sequences": [[asdict(piece) for piece in sequence] for sequence in sequences],
        }
        path.parent.mkdir(exist_ok=True)
        write_durably(path, json.dumps(content, indent=1).encode())

    def write_or_warn() -> None:
        try:
            write()
        except OSError as error:
            if action is not Action.update:
                raise
            logger.warning("%s of a step that is trained all the same cannot be written: %s", path, error)

    on_first_rank(write_or_warn)
    return Verdict(
        step=step,
        kind=kind,
        action=action,
        message=message,
        record=path,
        diagnosis=diagnosis,
        suspects=suspects if suspects is not None else diagnosis.suspects if diagnosis else [],
    )
