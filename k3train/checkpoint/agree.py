"""All ranks succeed or all ranks raise: file work that must not leave peers waiting in a collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException  # derives from BaseException

from k3train.backend.machine_faults import is_machine_fault
from k3train.checkpoint.manifest import CheckpointError, CheckpointFault
from k3train.config.problems import BadInput


def every_rank[T](work: Callable[[], T]) -> list[T]:
    """Run ``work`` on every rank and return all results, by rank; every rank of the world must call this.

    Raises CheckpointError on every rank, with the first rank's reason, when it raised on any; CheckpointFault
    when the machine failed there.
    """
    outcome: tuple[type[CheckpointError] | None, Any]
    try:
        outcome = (None, work())
    except (Exception, CheckpointException) as error:  # peers must hear of it, or they wait for the timeout
        kind = CheckpointFault if is_machine_fault(error) else CheckpointError
        outcome = (kind, describe(error))
    outcomes: list[Any] = [None] * world()
    if world() == 1:
        outcomes = [outcome]
    else:
        dist.all_gather_object(outcomes, outcome)
    failures = [(rank, kind, text) for rank, (kind, text) in enumerate(outcomes) if kind]
    if failures:
        rank, kind, text = failures[0]
        where = f" (rank {rank}; {len(failures)} of {world()} ranks failed)" if world() > 1 else ""
        raise kind(f"{text}{where}")
    return [value for _, value in outcomes]


def on_first_rank[T](work: Callable[[], T]) -> T:
    """Run ``work`` on rank 0 and return its result on every rank; every rank of the world must call this.

    Raises CheckpointError on every rank when it raised.
    """
    return every_rank(lambda: work() if rank() == 0 else None)[0]  # pyright: ignore[reportReturnType]


def gather_on_first[T](value: T) -> list[T]:
    """Every rank's ``value``, by rank, on rank 0; an empty list elsewhere. Every rank must call this."""
    if world() == 1:
        return [value]
    values: list[Any] | None = [None] * world() if rank() == 0 else None
    dist.gather_object(value, values)
    return values or []


def rank() -> int:
    """This process' rank; 0 outside a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """Number of ranks; 1 outside a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def describe(error: BaseException) -> str:
    """What went wrong, in one sentence, for the ranks that did not see it."""
    if isinstance(error, CheckpointException) and error.failures:
        return describe(next(iter(error.failures.values()))[0])
    if isinstance(error, BadInput):
        return str(error)
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return f"{type(error).__name__}: {error}"
