"""One optimizer step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from k3train.config.problems import Stopped
from k3train.data.batch import MicroBatch
from k3train.faults import point
from k3train.optim.build import allocate_state, members, optimizer_step, set_learning_rate
from k3train.optim.schedule import learning_rate
from k3train.router.update import update_biases
from k3train.train.progress import Progress
from k3train.train.schedule import run_micro_batches
from k3train.train.setup import StageSetup, gradients


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """How evenly tokens reached experts in one step, over all layers."""

    max_violation: float
    """Worst layer's (busiest expert's load) / (mean load) - 1."""
    load_cv: float
    """Worst layer's coefficient of variation of expert load."""
    dead_experts: int
    """Experts of all layers without a token."""


class TrainingError(Stopped):
    """Training cannot go on; the message says why in one sentence."""


@dataclass(kw_only=True, slots=True)
class StepResult:
    """What one step measured; the same on every rank."""

    loss: float
    """Mean over the step's predicted tokens, before the update."""
    grad_norm: float
    """Global L2 norm before clipping."""
    learning_rate: float
    balance: Balance | None
    """Worst router of the model; None without experts."""
    stop: bool
    """Whether any rank was asked to stop."""


def train_step(
    setup: StageSetup, progress: Progress, host: list[MicroBatch], *, wants_stop: bool
) -> StepResult:
    """Train on one global batch and advance ``progress``. Every rank must call this.

    ``host`` are the micro-batches of this data-parallel rank. Raises TrainingError when the loss or the
    gradient norm is not finite; the weights are then as before.
    """
    point("step.begin", step=progress.step + 1)
    zero_gradients(setup)
    sums = run_micro_batches(setup, host, backward=True)
    point("step.gradients", tensors=lambda: gradients(setup.chunks))
    loss, _, stop = agree(setup, sums, wants_stop)
    if not math.isfinite(loss):
        raise TrainingError(_not_finite(setup, progress, host, "loss", loss))

    tokens = progress.tokens + setup.plan.stage.batch_tokens
    rate = learning_rate(setup.run, setup.table, tokens)
    set_learning_rate(setup.optimizer, rate)
    point("step.update")
    outcome = optimizer_step(setup.optimizer)
    if outcome.skipped:
        raise TrainingError(_not_finite(setup, progress, host, "gradient norm", outcome.grad_norm))
    balance = worst_balance(setup, update_biases(setup.chunks, setup.groups.tokens))

    point("step.weights", tensors=lambda: weights(setup.chunks))
    point("step.moments", tensors=lambda: moments(setup.optimizer))
    progress.step += 1
    progress.tokens = tokens
    point("step.end")
    return StepResult(
        loss=loss,
        grad_norm=outcome.grad_norm,
        learning_rate=rate,
        balance=balance,
        stop=stop,
    )


def weights(chunks: list[Any]) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of this rank, by name."""
    for chunk in chunks:
        yield from chunk.module.named_parameters()


def moments(optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """This rank's fp32 master slices (``master``) and AdamW's moments of them, flat."""
    for member in members(optimizer):
        for master, state in member.optimizer.state.items():
            yield "master", master
            yield from ((key, value) for key, value in state.items() if isinstance(value, Tensor))


def rehearse(setup: StageSetup, progress: Progress) -> None:
    """Run the next batch forward and backward and throw the gradients away. Every rank must call this.

    The optimizer's state is allocated first, so that a run that will not fit in memory fails here, before its
    first step, and not after it.
    """
    allocate_state(setup.optimizer)
    step = progress.step - setup.plan.start_step
    host = setup.data.step(step, dp_rank=setup.groups.dp_rank, dp_size=setup.groups.layout.dp)
    run_micro_batches(setup, host, backward=True)
    update_biases(setup.chunks, setup.groups.tokens, discard=True)
    zero_gradients(setup)


def zero_gradients(setup: StageSetup) -> None:
    """Clear every gradient buffer."""
    for chunk in setup.chunks:
        chunk.zero_grad_buffer()
    setup.optimizer.zero_grad()


def agree(setup: StageSetup, sums: Tensor, wants_stop: bool) -> tuple[float, int, bool]:
    """Mean loss, predicted tokens and whether to stop, over all ranks, in one all-reduce of three numbers.

    ``sums`` is float64 [2], this rank's summed loss and token count (zeros without the last chunk).
    """
    vector = torch.cat([sums, sums.new_full((1,), float(wants_stop))])
    dist.all_reduce(vector)
    loss, count, stop = vector.tolist()
    # Every tensor-parallel rank of the last chunk reports the same tokens.
    count = round(count / setup.groups.layout.tp)
    return loss / setup.groups.layout.tp / max(count, 1), count, stop > 0


def worst_balance(setup: StageSetup, layers: dict[int, dict[str, float]]) -> Balance | None:
    """The worst of every layer, over all pipeline ranks, which own different layers; they must all call this.

    ``layers`` is what ``update_biases`` returned: this rank's layers.
    """
    if setup.run.model.num_dense_layers == setup.run.model.num_layers:
        return None
    worst = [
        max((layer[key] for layer in layers.values()), default=0.0) for key in ("max_violation", "load_cv")
    ]
    dead = sum(layer["dead_experts"] for layer in layers.values())
    if setup.groups.layout.pp > 1:
        shared = torch.tensor([*worst, dead], dtype=torch.float64, device=setup.device)
        dist.all_reduce(shared[:2], op=dist.ReduceOp.MAX, group=setup.groups.pg.pp)
        dist.all_reduce(shared[2:], group=setup.groups.pg.pp)
        *worst, dead = shared.tolist()
    violation, cv = worst
    return Balance(max_violation=violation, load_cv=cv, dead_experts=int(dead))


def _not_finite(
    setup: StageSetup, progress: Progress, host: list[MicroBatch], what: str, value: float
) -> str:
    pieces = [piece for batch in host for piece in batch.documents]
    named = ", ".join(f"{p.source}[{p.document}]" for p in pieces[:8]) + (" ..." if len(pieces) > 8 else "")
    return (
        f"{what} is {value} at step {progress.step + 1} of stage {setup.plan.name} "
        f"({progress.tokens} tokens). Nothing was updated and the last checkpoint is good: lower "
        f"optim.learning_rate, or look at this rank's {len(pieces)} documents of the step: {named}"
    )
