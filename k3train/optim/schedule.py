"""Learning rate as a pure function of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

from k3train.config.schema import Optim, Run, Schedule, Stage
from k3train.curriculum.stages import StagePlan

Bends = tuple[tuple[int, float], ...]
"""Where the run's length was changed under way: (tokens trained by then, progress reached by then)."""


def learning_rate(run: Run, table: Sequence[StagePlan], tokens: int, bends: Bends = ()) -> float:
    """Learning rate of the step after which the run has consumed ``tokens`` tokens (padding and all).

    The schedule spans the whole run: it depends on nothing but ``tokens`` and on ``bends``, so a resumed run
    continues it and a stage change does not restart it. A stage's own peak replaces ``optim.learning_rate``
    within that stage. A stage with re-warm-up starts from the lower of ``optim.min_learning_rate`` and where
    the stage before ended, and meets the schedule again after ``warmup_tokens``. A stage boundary belongs to
    the stage that ends there. Raises ValueError when ``tokens`` lies outside [0, tokens of the run].
    """
    total = table[-1].end_tokens
    if not 0 <= tokens <= total:
        raise ValueError(f"the run has {total} tokens; there is no learning rate at {tokens} tokens")
    index = next(i for i, row in enumerate(table) if tokens <= row.end_tokens)
    row = table[index]
    rewarm = row.stage.learning_rate.warmup_tokens
    into = tokens - row.start_tokens
    target = _scheduled(run.optim, row.stage, progress_at(bends, total, tokens))
    if into >= rewarm:
        return target
    before = learning_rate(run, table, row.start_tokens, bends) if index else 0.0
    return _between(min(before, run.optim.min_learning_rate), target, into / rewarm)


def progress_at(bends: Bends, total: int, tokens: int) -> float:
    """Share of the schedule, 0 to 1, that lies behind ``tokens``: straight from bend to bend, 1 at ``total``.

    Without bends it is ``tokens / total``.
    """
    last, reached = bends[-1] if bends else (0, 0.0)
    if tokens >= last:
        return reached + (1.0 - reached) * ((tokens - last) / max(total - last, 1))
    corners = [(0, 0.0), *bends]
    after = next(i for i, (at, _) in enumerate(corners) if tokens < at)
    (start, low), (end, high) = corners[after - 1], corners[after]
    return _between(low, high, (tokens - start) / (end - start))


def bend(bends: Bends, old_total: int, new_total: int, tokens: int) -> Bends:
    """The bends of a run of ``old_total`` tokens that goes on from ``tokens`` as one of ``new_total``.

    Progress stays what it is and takes another slope from here on, so that the rate does not jump and still
    ends where the schedule ends.
    """
    if old_total == new_total or tokens == 0:
        return bends
    return (*bends, (tokens, progress_at(bends, old_total, tokens)))


def _scheduled(optim: Optim, stage: Stage, progress: float) -> float:
    """The schedule at ``progress`` in [0, 1] through the run, with the stage's peak."""
    own_peak = stage.learning_rate.peak
    peak = optim.learning_rate if own_peak is None else own_peak
    floor = min(optim.min_learning_rate, peak)
    if progress < optim.warmup_fraction:
        return peak * (progress / optim.warmup_fraction)
    match optim.schedule:
        case Schedule.constant:
            return peak
        case Schedule.cosine:
            left = 1.0 - optim.warmup_fraction
            x = (progress - optim.warmup_fraction) / left if left > 0 else 1.0
            return _between(peak, floor, 0.5 * (1.0 - math.cos(math.pi * x)))
        case Schedule.wsd:
            decay = min(optim.decay_fraction, 1.0 - optim.warmup_fraction)
            left = 1.0 - progress
            return peak if left >= decay else _between(peak, floor, 1.0 - left / decay)


def _between(start: float, end: float, share: float) -> float:
    """Linear from ``start`` to ``end``, exactly equal to them at 0 and 1."""
    return start * (1.0 - share) + end * share
