"""Held-out loss, at a stage's own context length and one stage ahead."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from k3train.curriculum.stages import context_ahead
from k3train.data.batch import IGNORE, MicroBatch, join_batches
from k3train.data.heldout import heldout
from k3train.faults import point
from k3train.train.schedule import SUMS, agree, run_micro_batches
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


def rehearse_ahead(setup: StageSetup) -> None:
    """Run the first pass of an evaluation at the next stage's context length, if its buffers are longer than
    a step's, and keep nothing: what does not fit in memory fails here. Every rank must call this."""
    stage, context = setup.plan.stage, context_ahead(setup.run, setup.table, setup.plan)
    if context is None or context <= stage.micro_batch_sequences * stage.context_tokens:
        return
    for name in list(setup.run.data.heldout)[:1]:
        with _frozen(setup):
            run_micro_batches(setup, _passes(setup, name, context)[0], backward=False)


def _heldout_loss(setup: StageSetup, name: str, context_tokens: int, stop: StopRequest) -> HeldoutLoss | None:
    started = time.monotonic()
    sums = torch.zeros(SUMS, dtype=torch.float64, device=setup.device)
    with _frozen(setup):
        for host in _passes(setup, name, context_tokens):
            point("eval.batch")
            if any_wants_stop(stop, setup.device):
                return None
            sums += run_micro_batches(setup, host, backward=False)
    agreed = agree(setup, sums)
    return HeldoutLoss(
        heldout=name,
        context_tokens=context_tokens,
        loss=agreed.loss,
        predicted_tokens=agreed.predicted_tokens,
        seconds=time.monotonic() - started,
    )


def _passes(setup: StageSetup, name: str, context_tokens: int) -> list[list[MicroBatch]]:
    """What this rank hands the pipeline, pass by pass: the held-out sequences, in buffers of one length that
    is at most that of the stage's micro-batches, or of one sequence.

    Which sequences count depends on the run's ``eval_tokens`` and the context length alone. Expert-parallel
    peers of other data-parallel ranks must all take part in each pass, and the interleaved schedule takes
    buffers in groups of pp: a sequence that does not count fills what is left over.
    """
    layout, stage = setup.groups.layout, setup.plan.stage
    wanted = -(-setup.run.curriculum.eval_tokens // context_tokens)
    sequences = heldout(setup.run, name, context_tokens, wanted)
    group = layout.pp if layout.vp > 1 else 1
    buffers = layout.dp * group
    most = max(1, stage.micro_batch_sequences * stage.context_tokens // context_tokens)
    passes = -(-len(sequences) // (most * buffers))
    together = -(-len(sequences) // (passes * buffers))
    sequences += [_uncounted(sequences[-1])] * (passes * buffers * together - len(sequences))
    joined = [join_batches(sequences[i : i + together]) for i in range(0, len(sequences), together)]
    first = setup.groups.dp_rank * group
    return [joined[i : i + group] for i in range(first, len(joined), buffers)]


def _uncounted(sequence: MicroBatch) -> MicroBatch:
    """The sequence with nothing to predict in it."""
    return replace(
        sequence,
        labels=np.full_like(sequence.labels, IGNORE),
        labels_mtp=np.full_like(sequence.labels_mtp, IGNORE),
    )


@contextmanager
def _frozen(setup: StageSetup) -> Iterator[None]:
    """Passes leave no trace: no gradients, and routers count nothing."""
    for chunk in setup.chunks:
        chunk.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for chunk in setup.chunks:
            chunk.train()
