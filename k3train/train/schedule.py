"""Runs micro-batches through the pipeline: forward and backward, or forward alone; and sums up over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from k3train.data.batch import IGNORE, MicroBatch
from k3train.data.device import RankBatch, to_device
from k3train.faults import point
from k3train.optim.build import forget_logits
from k3train.train.setup import StageSetup

SUMS = 4
"""Numbers that ``run_micro_batches`` returns."""


def run_micro_batches(setup: StageSetup, host: list[MicroBatch], *, backward: bool) -> Tensor:
    """Push micro-batches through the pipeline; every rank must call this with equally many of equal length.

    ``host`` holds whole buffers; each context-parallel rank takes its own share of them to its device.

    Returns float64 [4] on the device: this rank's summed next-token loss and its number of predicted tokens,
    and the same of MTP, without its weight; zeros on ranks without the last chunk. Gradients are left in the
    chunks' buffers, reduced over data-parallel ranks: those of the loss summed over the predicted tokens of
    the whole step, the weighted one of MTP included.
    """
    chunks, layout = setup.chunks, setup.groups.layout
    batches = [
        to_device(batch, cp_rank=setup.groups.cp_rank, cp_size=layout.cp, device=setup.device)
        for batch in host
    ]
    run = get_forward_backward_func(pp_size=layout.pp, vp_size=layout.vp if layout.vp > 1 else None)
    iterators = [iter(batches) for _ in chunks]
    weight = setup.config.k3.mtp.loss_weight
    sums = run(
        forward_step_func=partial(_forward, with_mtp=backward, mtp_weight=weight),
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(batches),
        # megatron-core sizes its pipeline messages from this and divides by cp and tp itself.
        seq_length=host[0].tokens.size,
        micro_batch_size=1,
        forward_only=not backward,
    )
    total = torch.zeros(SUMS, dtype=torch.float64, device=setup.device)
    for part in sums:
        total += part
    return total


def zero_gradients(setup: StageSetup) -> None:
    """Clear every gradient buffer, and what QK-Clip saw in the passes that filled them."""
    for chunk in setup.chunks:
        chunk.zero_grad_buffer()
    setup.optimizer.zero_grad()
    forget_logits(setup.optimizer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreed:
    """Sums over all ranks; the same on every rank."""

    loss: float
    """Mean next-token loss per predicted token, in nats."""
    mtp_loss: float | None
    """Mean loss of MTP per token that it predicts, in nats; None where it predicts none or weighs nothing."""
    predicted_tokens: int
    grad_norm: float
    """Of the mean loss."""
    stop: bool
    """Whether any rank was asked to stop."""
    squares: float
    """Squared lengths of the step's documents, summed."""
    padding: float
    """Tokens of the step that are padding."""
    memory_gib: float | None
    """The fullest rank's; None when ranks gave none."""


def agree(
    setup: StageSetup,
    sums: Tensor,
    *,
    wants_stop: bool = False,
    norm: float = 0.0,
    squares: float = 0.0,
    padding: float = 0.0,
    memory_gib: float | None = None,
) -> Agreed:
    """What all ranks have seen, in one small all-reduce. Every rank must call this.

    ``sums`` is what ``run_micro_batches`` returned on this rank, or the sum over several calls. ``norm``,
    of the summed loss' gradients, should be the same on every rank; if a broken one disagrees, the result is
    still the same everywhere. ``squares`` and ``padding`` are sums over this data-parallel rank's
    micro-batches. ``memory_gib``, which all ranks give or none, adds one number per rank.
    """
    layout = setup.groups.layout
    own = [norm, float(wants_stop), squares, padding]
    if memory_gib is not None:  # a sum gives the maximum too where each rank has a place of its own
        places = [0.0] * layout.world
        places[dist.get_rank()] = memory_gib
        own += places
    vector = torch.cat([sums, sums.new_tensor(own)])
    dist.all_reduce(vector)
    loss, count, mtp_loss, mtp_count, norms, stop, squares, padding, *memory = vector.tolist()
    # Every tensor-parallel rank of the last chunk reports the same tokens.
    count = round(count / layout.tp)
    return Agreed(
        loss=loss / layout.tp / max(count, 1),
        mtp_loss=mtp_loss / mtp_count if mtp_count else None,
        predicted_tokens=count,
        grad_norm=norms / layout.world / max(count, 1),
        stop=stop > 0,
        # Every rank of a model replica has the same documents.
        squares=squares * layout.dp / layout.world,
        padding=padding * layout.dp / layout.world,
        memory_gib=max(memory, default=None),
    )


def _forward(
    iterator: Iterator[RankBatch], chunk: Any, *, with_mtp: bool, mtp_weight: float
) -> tuple[Tensor, Any]:
    batch = next(iterator)
    point("step.forward")
    # Held-out loss is the next-token loss alone; training adds the weighted MTP loss.
    labels_mtp = batch.labels_mtp if with_mtp else None
    output = chunk(batch.tokens, batch.packing, labels=batch.labels, labels_mtp=labels_mtp)
    return output, partial(_sum_loss, batch, mtp_weight)


def _sum_loss(batch: RankBatch, mtp_weight: float, per_token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """megatron-core's loss contract: a sum to differentiate, the count it divides by, and what to report."""
    count = (batch.labels != IGNORE).sum().int()
    point("step.loss", tensors=lambda: [("loss", per_token)])
    loss = per_token[0].sum()
    seen = torch.zeros(SUMS, dtype=torch.float64, device=loss.device)
    seen[0], seen[1] = loss.detach(), count
    if len(per_token) > 1:
        weighted = per_token[1].sum()
        loss = loss + weighted
        if mtp_weight:
            seen[2], seen[3] = weighted.detach() / mtp_weight, (batch.labels_mtp != IGNORE).sum()
    return loss, count, seen
