"""What becomes of a step that is not as it should be: computed again, judged, dealt with as configured."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from torch import Tensor

from k3train.config.trained import CHECKPOINTS
from k3train.data.batch import MicroBatch
from k3train.train.guards import Action, Finding, judge, overruled
from k3train.train.left_out import ROLLBACK, LeftOut, can_go_back, write_left_out
from k3train.train.progress import Progress, is_due
from k3train.train.replicas import Damage, changed_at_rest, fingerprint, odd_replicas
from k3train.train.rerun import Diagnosis, compute_again, gather_evidence
from k3train.train.setup import StageSetup
from k3train.train.verdict import Verdict, record_verdict


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
    finding, diagnosis = _decide(setup, progress, host, sums, loss, norm)
    if finding is None:
        return None
    leaves = _leaves_out(progress, finding, setup.run.guards.rollback_steps)
    limit = leaves and _limit(setup, progress, leaves)
    if limit:
        finding = replace(finding, action=Action.stop)
    elif leaves:
        progress.guards.left_out.append(leaves)
        write_left_out(Path(setup.run.dir), progress.guards.left_out)
    return _record(setup, progress, finding, diagnosis, limit, loss, norm)


def examine_state(setup: StageSetup, progress: Progress) -> Verdict | None:
    """Compare the replicas of what the optimizer has just written, in the steps that are due; None when all
    agree. What is compared now is compared once more before the next step. Every rank must call this."""
    setup.resting = None
    if not is_due(progress.step + 1, setup.run.guards.digest_every_steps):
        return None
    setup.resting = fingerprint(setup)
    damage = odd_replicas(setup, setup.resting)
    return damage and _damaged(setup, progress, "replicas", damage, "replicas differ after")


def _decide(
    setup: StageSetup, progress: Progress, host: list[MicroBatch], sums: Tensor, loss: float, norm: float
) -> tuple[Finding | None, Diagnosis | None]:
    """What is wrong with the step and what is to be done, and what computing it again has shown.

    Computing it again leaves the last pass's gradients in place of those that ``loss`` and ``norm`` belong
    to. They may be applied, with these numbers, only when all their bits are the same: ``overruled`` sees to
    it that a step which came out differently is never an update, and is left out only when it is bad again.
    """
    settings, state = setup.run.guards, progress.guards
    state.enter_stage(setup.plan.name)
    finding = judge(settings, state, loss, norm)
    replay = is_due(progress.step + 1, settings.replay_every_steps)
    if not replay and (finding is None or finding.action is Action.update or not settings.rerun):
        return finding, None
    nonfinite = finding is not None and finding.kind == "nonfinite"
    diagnosis = compute_again(setup, host, gather_evidence(setup, sums), look_for_nonfinite=nonfinite)
    if not diagnosis.hardware:
        return finding, diagnosis
    again = judge(settings, state, diagnosis.loss, diagnosis.grad_norm)
    return overruled(finding, again, loss), diagnosis


def _examine_rest(setup: StageSetup, progress: Progress) -> Verdict | None:
    if setup.resting is None:
        return None
    damage = changed_at_rest(setup.resting, fingerprint(setup))
    return damage and _damaged(
        setup, progress, "damage", damage, "the state changed, which nothing may do, in"
    )


def _damaged(setup: StageSetup, progress: Progress, kind: str, damage: Damage, what: str) -> Verdict:
    message = f"{what} step {progress.step + 1} of stage {setup.plan.name} on {damage}; suspect the hardware"
    return record_verdict(setup, progress, kind, Action.stop, message, asdict(damage), suspects=damage.ranks)


def _limit(setup: StageSetup, progress: Progress, leaves: LeftOut) -> str | None:
    """Why the steps ``leaves`` cannot be left out, because it was done often enough or there is nothing to go
    back to; None when they can."""
    settings, state = setup.run.guards, progress.guards
    if leaves.why != ROLLBACK:
        if state.skipped_in_a_row < settings.max_skipped_in_a_row:
            return None
        return f"guards.max_skipped_in_a_row = {settings.max_skipped_in_a_row} steps were skipped before it"
    if sum(entry.why == ROLLBACK for entry in state.left_out) >= settings.max_rollbacks:
        return f"the run has gone back guards.max_rollbacks = {settings.max_rollbacks} times"
    if can_go_back(Path(setup.run.dir) / CHECKPOINTS, [*state.left_out, leaves]):
        return None
    return (
        f"the run cannot go back: none of its checkpoints is from before step {leaves.first}, the first that "
        f"guards.rollback_steps = {settings.rollback_steps} leaves out"
    )


def _record(
    setup: StageSetup,
    progress: Progress,
    finding: Finding,
    diagnosis: Diagnosis | None,
    limit: str | None,
    loss: float,
    norm: float,
) -> Verdict:
    """The verdict on a step of this loss and norm, with all that led to it in the step's record."""
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
    return record_verdict(setup, progress, finding.kind, finding.action, message, details, diagnosis)


def _leaves_out(progress: Progress, finding: Finding, rollback_steps: int) -> LeftOut | None:
    """The steps that the finding's action leaves out."""
    step = progress.step + 1
    if finding.action is Action.skip:
        return LeftOut(step, step, finding.kind)
    if finding.action is Action.rollback:
        return LeftOut(max(step - rollback_steps + 1, 1), step, ROLLBACK)
    return None
