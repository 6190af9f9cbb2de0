"""Computes a step again: the same bits mean data or model, other bits mean hardware."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from k3train.data.batch import MicroBatch
from k3train.optim.build import gradient_norm
from k3train.train.digest import digest
from k3train.train.schedule import Agreed, agree, run_micro_batches, zero_gradients
from k3train.train.setup import StageSetup

SAME = "same"
"""The step came out with the same bits: data or model (or a fault that repeats itself exactly)."""
TRANSIENT = "transient"
"""Only the first time differs: hardware failed once."""
UNSTABLE = "unstable"
"""No two times agree: hardware that fails again and again, or kernels that do not repeat their bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What one rank computed in one step, as digests."""

    loss: int
    """Summed loss and token count of this rank."""
    local: int
    """Gradients that this rank alone computed: what the reduction leaves of them outside its own shard."""
    reduced: int
    """This rank's shard of the reduced gradient: every data-parallel rank had a part in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What computing a step again has shown; the same on every rank."""

    verdict: str
    """same, transient or unstable."""
    suspects: list[int]
    """Ranks whose own part came out differently: one when the fault can be told from what it did to peers."""
    first_nonfinite: str | None
    """Where NaN or infinity first appeared when the step was computed again; None where all was finite."""
    loss: float
    """The step's, as it came out the last time."""
    grad_norm: float
    """The same of its gradient norm."""

    @property
    def hardware(self) -> bool:
        """Whether a machine is to be suspected."""
        return self.verdict != SAME

    def to_json(self) -> dict[str, Any]:
        """Plain values for a record."""
        return {**asdict(self), "loss": str(self.loss), "grad_norm": str(self.grad_norm)}  # no NaN in JSON

    def __str__(self) -> str:
        where = f"; NaN or infinity first came from {self.first_nonfinite}" if self.first_nonfinite else ""
        if not self.hardware:
            return f"computed again it came out the same, so look at data and model{where}"
        ranks = " and ".join(str(rank) for rank in self.suspects)
        which = f"{'rank' if len(self.suspects) == 1 else 'one of ranks'} {ranks} is suspected"
        if self.verdict == TRANSIENT:
            return f"computed again it came out differently, so suspect the hardware: {which}"
        return (
            f"it comes out differently each time, so suspect the hardware, or kernels that do not repeat "
            f"their bits: {which}"
        )


def gather_evidence(setup: StageSetup, sums: Tensor) -> Evidence:
    """Digests of the step that has just been computed; ``sums`` is what ``run_micro_batches`` returned."""
    local: list[Tensor] = []
    reduced: list[Tensor] = []
    for chunk in setup.chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            ranks = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                shards = bucket.grad_data.chunk(ranks.size())
                reduced.append(shards[ranks.rank()])
                local += [shard for rank, shard in enumerate(shards) if rank != ranks.rank()]
    return Evidence(loss=digest([sums]), local=digest(local), reduced=digest(reduced))


def compute_again(
    setup: StageSetup, host: list[MicroBatch], first: Evidence, *, look_for_nonfinite: bool
) -> Diagnosis:
    """Compute the step once more, and a third time if that differs. Every rank must call this.

    Gradients of the last time are left in place, ready for the optimizer, and routers have counted only its
    tokens.
    """
    trace: list[_Place] = []
    with _traced(setup, trace) if look_for_nonfinite else contextlib.nullcontext():
        second, seen = _once_more(setup, host)
    if look_for_nonfinite:
        trace += _nonfinite_gradients(setup)
    forward_is_own = setup.groups.layout.pp == 1
    different = _ranks_that_differ(first, second, forward_is_own)
    verdict = SAME
    if different:
        third, seen = _once_more(setup, host)
        verdict = UNSTABLE if (again := _ranks_that_differ(second, third, forward_is_own)) else TRANSIENT
        different = again or different
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, min(trace, default=None))
    earliest = min((place for place in found if place is not None), default=None)
    return Diagnosis(
        verdict=verdict,
        suspects=different,
        first_nonfinite=None if earliest is None else str(earliest),
        loss=seen.loss,
        grad_norm=seen.grad_norm,
    )


def _once_more(setup: StageSetup, host: list[MicroBatch]) -> tuple[Evidence, Agreed]:
    zero_gradients(setup)
    setup.routers.count_again()
    sums = run_micro_batches(setup, host, backward=True)
    norm = gradient_norm(setup.optimizer)
    return gather_evidence(setup, sums), agree(setup, sums, norm=norm)


def _ranks_that_differ(one: Evidence, other: Evidence, forward_is_own: bool) -> list[int]:
    """Ranks that computed something else of their own; those of a changed shard if there are none.

    A loss comes before any gradient, so where a rank has the whole forward pass it tells more. What a
    reduction leaves outside its own shard counts only for telling ranks apart: no library promises it.
    """
    mine = (one.loss != other.loss, one.local != other.local, one.reduced != other.reduced)
    all_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_ranks, mine)
    if not any(loss or reduced for loss, _, reduced in all_ranks):
        return []
    if forward_is_own and (own := [rank for rank, (loss, _, _) in enumerate(all_ranks) if loss]):
        return own
    own = [rank for rank, (loss, local, _) in enumerate(all_ranks) if loss or local]
    return own or [rank for rank, (_, _, reduced) in enumerate(all_ranks) if reduced]


@dataclass(frozen=True, order=True, slots=True)
class _Place:
    """Where something first was not finite, in the order in which it was computed."""

    backward: bool
    micro_batch: int
    chunk: int
    """Place of the chunk in the pipeline."""
    call: int
    rank: int
    name: str

    def __str__(self) -> str:
        what = f"the gradient of {self.name}"
        if not self.backward:
            what = f"{self.name or 'the loss'} in micro-batch {self.micro_batch}"
        return f"{what} on rank {self.rank}"


@contextlib.contextmanager
def _traced(setup: StageSetup, trace: list[_Place]) -> Iterator[None]:
    """Note the first module of each forward pass whose output is not finite."""
    handles = []
    layout, rank = setup.groups.layout, dist.get_rank()
    for index, chunk in enumerate(setup.chunks):
        position = index * layout.pp + setup.groups.pp_rank
        seen = {"passes": 0, "calls": 0}

        def after(
            name: str, position: int, seen: dict[str, int], module: Any, inputs: Any, output: Any
        ) -> None:
            seen["calls"] += 1
            if not _finite(output):
                trace.append(_Place(False, seen["passes"], position, seen["calls"], rank, name))
            if not name:  # the whole chunk: the micro-batch is through
                seen.update(passes=seen["passes"] + 1, calls=0)

        for name, module in chunk.module.named_modules():
            handles.append(module.register_forward_hook(partial(after, name, position, seen)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _finite(output: Any) -> bool:
    tensors = output if isinstance(output, tuple | list) else (output,)
    return all(bool(t.isfinite().all()) for t in tensors if isinstance(t, Tensor) and t.is_floating_point())


def _nonfinite_gradients(setup: StageSetup) -> list[_Place]:
    """The parameter nearest to the loss whose gradient is not finite: backward reached it first."""
    places = []
    layout = setup.groups.layout
    for index, chunk in enumerate(setup.chunks):
        position = index * layout.pp + setup.groups.pp_rank
        bad = [name for name, p in chunk.module.named_parameters() if not _finite(p.main_grad)]
        places += [_Place(True, 0, -position, -i, dist.get_rank(), name) for i, name in enumerate(bad)]
    return places
