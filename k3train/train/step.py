"""One optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from k3train.data.batch import MicroBatch, padding_tokens, squared_lengths
from k3train.faults import point
from k3train.optim.build import (
    allocate_state,
    apply_gradients,
    gradient_norm,
    largest_logit,
    set_learning_rate,
)
from k3train.optim.schedule import learning_rate
from k3train.train.balance import Balance, look_closer_if_due, settle
from k3train.train.examine import examine, examine_state
from k3train.train.guards import Action
from k3train.train.left_out import ROLLBACK
from k3train.train.progress import Progress
from k3train.train.schedule import SUMS, agree, run_micro_batches, zero_gradients
from k3train.train.setup import StageSetup, gradients, moments, weights
from k3train.train.stragglers import Slowest
from k3train.train.verdict import Verdict


@dataclass(kw_only=True, slots=True)
class StepResult:
    """What one step measured; the same on every rank."""

    loss: float
    """Mean next-token loss over the step's predicted tokens, before the update; NaN when the step was left
    out."""
    grad_norm: float
    """Global L2 norm before clipping; NaN when the step was left out."""
    learning_rate: float
    balance: Balance | None
    """Every router of the model; None without experts or without an update."""
    stop: bool
    """Whether any rank was asked to stop."""
    verdict: Verdict | None
    """What was found wrong with the step, or with the state after it."""
    max_logit: float | None = None
    """Largest attention logit of MLA, before QK-Clip; None without QK-Clip or without an update."""
    document_tokens: float | None = None
    """Length of the document that a token of the step is in, on average over its tokens; None when the step
    was left out."""
    padding: float | None = None
    """Share of the step's tokens that are padding, 0 to 1; None when the step was left out."""
    memory_gib: float | None = None
    """Largest memory in use on any rank's GPU from the start of the run to this step's backward pass; None on
    the CPU."""
    mtp_loss: float | None = None
    """Mean loss of MTP over the tokens that it predicts, without its weight; None without MTP."""
    slowest: Slowest | None = None
    """The slowest rank, in steps that measure it."""
    left_out: str | None = None
    """Why an earlier judgement leaves the step out."""

    @property
    def action(self) -> Action:
        """What becomes of the step."""
        if self.left_out is not None:
            return Action.skip
        return Action.update if self.verdict is None else self.verdict.action


def train_step(
    setup: StageSetup, progress: Progress, host: list[MicroBatch], *, wants_stop: bool
) -> StepResult:
    """Train on one global batch and advance ``progress``. Every rank must call this.

    ``host`` are the micro-batches of this data-parallel rank. Loss and gradient norm are judged before the
    optimizer steps. A step that is skipped leaves parameters, moments and selection biases as they were, and
    its tokens count as trained; one that ends the run, or sends it back, does not advance ``progress``.
    """
    point("step.begin", step=progress.step + 1)
    left_out = progress.guards.why_left_out(progress.step + 1)
    if left_out is not None:
        return _leave_out(setup, progress, left_out, wants_stop)
    zero_gradients(setup)
    look_closer_if_due(setup, progress.step + 1)
    sums = run_micro_batches(setup, host, backward=True)
    point("step.gradients", tensors=lambda: gradients(setup.chunks))
    norm, memory = gradient_norm(setup.optimizer), peak_memory_gib(setup.device)
    seen = agree(
        setup,
        sums,
        wants_stop=wants_stop,
        norm=norm,
        squares=squared_lengths(host),
        padding=padding_tokens(host),
        memory_gib=memory,
    )
    verdict = examine(setup, progress, host, sums, seen.loss, seen.grad_norm)

    tokens = progress.tokens + setup.plan.stage.batch_tokens
    rate = learning_rate(setup.run, setup.table, tokens, progress.bends)
    result = StepResult(
        loss=seen.loss,
        mtp_loss=seen.mtp_loss,
        grad_norm=seen.grad_norm,
        learning_rate=rate,
        balance=None,
        stop=seen.stop,
        verdict=verdict,
        document_tokens=seen.squares / setup.plan.stage.batch_tokens,
        padding=seen.padding / setup.plan.stage.batch_tokens,
        memory_gib=seen.memory_gib,
    )
    if result.action is Action.update:
        set_learning_rate(setup.optimizer, rate)
        point("step.update")
        apply_gradients(setup.optimizer, seen.grad_norm, divisor=max(seen.predicted_tokens, 1))
        result.balance = settle(setup, progress.step + 1)
        result.max_logit = worst_logit(setup)
        verdict = examine_state(setup, progress)
        result.verdict = verdict or result.verdict
        progress.guards.updated(seen.loss, seen.grad_norm, setup.run.guards.spike_window_steps)
    else:
        setup.routers.discard()
        if result.action is not Action.skip:
            return result
        progress.guards.not_updated(planned=False)
    point("step.weights", tensors=lambda: weights(setup.chunks))
    point("step.moments", tensors=lambda: moments(setup.optimizer))
    progress.step += 1
    progress.tokens = tokens
    point("step.end")
    return result


def _leave_out(setup: StageSetup, progress: Progress, why: str, wants_stop: bool) -> StepResult:
    """Advance over a step that is not trained."""
    nothing = torch.zeros(SUMS, dtype=torch.float64, device=setup.device)
    seen = agree(setup, nothing, wants_stop=wants_stop, memory_gib=peak_memory_gib(setup.device))
    progress.guards.not_updated(planned=why == ROLLBACK)
    progress.step += 1
    progress.tokens += setup.plan.stage.batch_tokens
    return StepResult(
        loss=math.nan,
        grad_norm=math.nan,
        learning_rate=learning_rate(setup.run, setup.table, progress.tokens, progress.bends),
        balance=None,
        stop=seen.stop,
        verdict=None,
        memory_gib=seen.memory_gib,
        left_out=why,
    )


def peak_memory_gib(device: torch.device) -> float | None:
    """Largest memory in use on this rank's GPU since the run started; None on the CPU."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None


def worst_logit(setup: StageSetup) -> float | None:
    """The largest attention logit of the step over all ranks, which must all call this; None when off."""
    if not setup.run.optim.qk_clip.enabled:
        return None
    largest = torch.tensor(largest_logit(setup.optimizer), dtype=torch.float32, device=setup.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=setup.groups.pg.mp)
    return float(largest) if largest > -math.inf else None


def rehearse(setup: StageSetup, progress: Progress) -> None:
    """Run the next batch forward and backward and throw the gradients away. Every rank must call this.

    The optimizer's state is allocated first, so that a run that will not fit in memory fails here, before its
    first step, and not after it.
    """
    allocate_state(setup.optimizer)
    step = setup.plan.steps_done(progress.tokens)
    host = setup.data.step(step, dp_rank=setup.groups.dp_rank, dp_size=setup.groups.layout.dp)
    run_micro_batches(setup, host, backward=True)
    setup.routers.discard()
    zero_gradients(setup)
