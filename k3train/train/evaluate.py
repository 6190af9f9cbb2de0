"""Held-out loss, at a stage's own context length and one stage ahead."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from k3train.curriculum.stages import StagePlan
from k3train.data.batch import MicroBatch, join_batches
from k3train.data.heldout import heldout
from k3train.faults import point
from k3train.train.schedule import agree, run_micro_batches
from k3train.train.setup import StageSetup
from k3train.train.signals import StopRequest, any_wants_stop


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldoutLoss:
    """Loss on one held-out set at one context length; the same on every rank."""

    heldout: str
    context_tokens: int
    loss: float
    """Mean per predicted token, in nats."""
    predicted_tokens: int
    seconds: float


def evaluate(setup: StageSetup, contexts: list[int], stop: StopRequest) -> tuple[list[HeldoutLoss], bool]:
    """Loss of every held-out set at each context length, in tokens, and whether the run was asked to stop
    meanwhile: then what is not yet measured is left out. Every rank must call this.

    Routers are frozen: their bias selects as in training, nothing is counted.
    """
    losses: list[HeldoutLoss] = []
    for name in setup.run.data.heldout:
        for context in contexts:
            measured = _heldout_loss(setup, name, context, stop)
            if measured is None:
                return losses, True
            losses.append(measured)
    return losses, False


def eval_contexts(setup: StageSetup) -> list[int]:
    """Context lengths that a stage evaluates: its own and, if the run says so, the next one's."""
    contexts = [setup.plan.stage.context_tokens]
    following: list[StagePlan] = setup.table[setup.plan.index + 1 :]
    if setup.run.curriculum.eval_one_ahead and following:
        contexts.append(following[0].stage.context_tokens)
    return contexts


def _heldout_loss(setup: StageSetup, name: str, context_tokens: int, stop: StopRequest) -> HeldoutLoss | None:
    started = time.monotonic()
    buffers = _buffers(setup, name, context_tokens)
    layout = setup.groups.layout
    sums = torch.zeros(2, dtype=torch.float64, device=setup.device)
    _set_training(setup, False)
    try:
        with torch.no_grad():
            # Expert-parallel peers of other data-parallel ranks must all take part in each forward pass, so
            # every rank runs as many; a rank without a sequence of its own repeats one and does not count it.
            for first in range(0, len(buffers), layout.dp):
                point("eval.batch")
                if any_wants_stop(stop, setup.device):
                    return None
                index = first + setup.groups.dp_rank
                part = run_micro_batches(setup, [buffers[index % len(buffers)]], backward=False)
                if index < len(buffers):
                    sums += part
    finally:
        _set_training(setup, True)
    agreed = agree(setup, sums)
    return HeldoutLoss(
        heldout=name,
        context_tokens=context_tokens,
        loss=agreed.loss,
        predicted_tokens=agreed.predicted_tokens,
        seconds=time.monotonic() - started,
    )


def _buffers(setup: StageSetup, name: str, context_tokens: int) -> list[MicroBatch]:
    """Held-out sequences, joined up to the size of the stage's micro-batches; all of one length."""
    stage = setup.plan.stage
    together = max(1, stage.micro_batch_sequences * stage.context_tokens // context_tokens)
    wanted = -(-setup.run.curriculum.eval_tokens // context_tokens)
    together = min(together, wanted)
    sequences = heldout(setup.run, name, context_tokens, -(-wanted // together) * together)
    whole = len(sequences) - len(sequences) % together
    if whole == 0:
        together, whole = 1, len(sequences)
    return [join_batches(sequences[i : i + together]) for i in range(0, whole, together)]


def _set_training(setup: StageSetup, training: bool) -> None:
    for chunk in setup.chunks:
        chunk.train(training)
