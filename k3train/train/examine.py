"""What becomes of a step that is not as it should be: computed again, recorded, dealt with as configured."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from k3train.checkpoint.agree import on_first_rank
from k3train.checkpoint.manifest import write_durably
from k3train.config.problems import Stopped
from k3train.data.batch import MicroBatch
from k3train.train.guards import Action, Finding, judge
from k3train.train.left_out import LeftOut, write_left_out
from k3train.train.progress import Progress
from k3train.train.replicas import Damage, changed_at_rest, fingerprint, odd_replicas
from k3train.train.rerun import Diagnosis, compute_again, gather_evidence
from k3train.train.setup import StageSetup
from k3train.train.signals import EXIT_BAD_STEP, EXIT_HARDWARE, EXIT_UNEXPECTED

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


def examine(
    setup: StageSetup, progress: Progress, host: list[MicroBatch], sums: Tensor, loss: float, norm: float
) -> Verdict | None:
    """Judge the step that has just been computed; None when nothing is wrong. Every rank must call this.

    ``sums`` is this rank's own part, ``loss`` and ``norm`` are the whole step's. Steps to leave out are
    written to the run's folder before this returns.
    """
    damaged = _examine_rest(setup, progress)
    if damaged is not None:
        return damaged
    settings, state = setup.run.guards, progress.guards
    state.enter_stage(setup.plan.name)
    finding = judge(settings, state, loss, norm)
    replay = _due(progress.step + 1, settings.replay_every_steps)
    diagnosis = None
    if replay or (finding is not None and finding.action is not Action.update and settings.rerun):
        evidence = gather_evidence(setup, sums)
        nonfinite = finding is not None and finding.kind == "nonfinite"
        diagnosis = compute_again(setup, host, evidence, look_for_nonfinite=nonfinite)
    if finding is None:
        if diagnosis is None or not diagnosis.hardware:
            return None
        finding = Finding(kind="replay", quantity="step", value=loss, action=Action.stop)
    finding, limit = _limited(setup, progress, finding)
    _leave_out(setup, progress, finding)
    what = "this step repeats differently" if finding.kind == "replay" else str(finding)
    told = f"{what} in step {progress.step + 1} of stage {setup.plan.name}"
    message = "; ".join(part for part in (told, diagnosis and str(diagnosis), limit) if part)
    details = {
        "loss": str(loss),  # JSON has no NaN
        "grad_norm": str(norm),
        "usual": finding.usual,
        "score": finding.score,
        "computed_again": diagnosis and diagnosis.to_json(),
    }
    return _verdict(setup, progress, finding.kind, finding.action, message, details, diagnosis)


def examine_state(setup: StageSetup, progress: Progress) -> Verdict | None:
    """Compare the replicas of what the optimizer has just written, in the steps that are due; None when all
    agree. What is compared now is compared once more before the next step. Every rank must call this."""
    setup.resting = None
    if not _due(progress.step + 1, setup.run.guards.digest_every_steps):
        return None
    setup.resting = fingerprint(setup)
    damage = odd_replicas(setup, setup.resting)
    return damage and _damaged(setup, progress, "replicas", damage, "replicas differ after")


def _examine_rest(setup: StageSetup, progress: Progress) -> Verdict | None:
    if setup.resting is None:
        return None
    damage = changed_at_rest(setup.resting, fingerprint(setup))
    return damage and _damaged(
        setup, progress, "damage", damage, "the state changed, which nothing may do, in"
    )


def _damaged(setup: StageSetup, progress: Progress, kind: str, damage: Damage, what: str) -> Verdict:
    message = f"{what} step {progress.step + 1} of stage {setup.plan.name} on {damage}; suspect the hardware"
    return _verdict(setup, progress, kind, Action.stop, message, asdict(damage), suspects=damage.ranks)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _limited(setup: StageSetup, progress: Progress, finding: Finding) -> tuple[Finding, str | None]:
    """The finding, with ``stop`` in place of what has been done often enough, and why."""
    settings, state = setup.run.guards, progress.guards
    if finding.action is Action.skip and state.skipped_in_a_row >= settings.max_skipped_in_a_row:
        why = f"guards.max_skipped_in_a_row = {settings.max_skipped_in_a_row} steps were skipped before it"
        return replace(finding, action=Action.stop), why
    rollbacks = sum(entry.why == Action.rollback.value for entry in state.left_out)
    if finding.action is Action.rollback and rollbacks >= settings.max_rollbacks:
        why = f"the run has gone back guards.max_rollbacks = {settings.max_rollbacks} times"
        return replace(finding, action=Action.stop), why
    return finding, None


def _leave_out(setup: StageSetup, progress: Progress, finding: Finding) -> None:
    step = progress.step + 1
    if finding.action is Action.skip:
        entry = LeftOut(step, step, finding.kind)
    elif finding.action is Action.rollback:
        entry = LeftOut(max(step - setup.run.guards.rollback_steps + 1, 1), step, Action.rollback.value)
    else:
        return
    progress.guards.left_out.append(entry)
    write_left_out(Path(setup.run.dir), progress.guards.left_out)


def _verdict(
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
        sequences = setup.data.documents(progress.step - setup.plan.start_step)
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

    on_first_rank(write)
    return Verdict(
        step=step,
        kind=kind,
        action=action,
        message=message,
        record=path,
        diagnosis=diagnosis,
        suspects=suspects if suspects is not None else diagnosis.suspects if diagnosis else [],
    )
