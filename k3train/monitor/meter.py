"""Time per step, throughput and time left, from a monotonic clock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

WINDOW_STEPS = 20
"""Steps over which the speed behind an ETA is averaged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTiming:
    """Where the time of one step went."""

    step_seconds: float
    data_wait_seconds: float
    tokens_per_second: float


class Meter:
    """Measures steps. Between ``start`` and ``finish_step``, or two ``finish_step``, all time is step time.

    ``clock`` returns seconds and never goes back. Time spent in ``pause`` (evaluation, checkpoints) belongs
    to no step.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._mark = clock()
        self._waited = 0.0
        self._recent: deque[tuple[int, float]] = deque(maxlen=WINDOW_STEPS)

    def start(self) -> None:
        """Begin a stretch of steps whose speed has nothing to do with what was before: a run, a stage."""
        self._recent.clear()
        self._begin_step()

    @contextmanager
    def data_wait(self) -> Iterator[None]:
        """Time within it is step time in which training waits for data."""
        before = self._clock()
        try:
            yield
        finally:
            self._waited += self._clock() - before

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time within it is no step time."""
        before = self._clock()
        try:
            yield
        finally:
            self._mark += self._clock() - before

    def finish_step(self, tokens: int) -> StepTiming:
        """End a step that consumed ``tokens`` and begin the next."""
        seconds = self._clock() - self._mark
        timing = StepTiming(
            step_seconds=seconds,
            data_wait_seconds=self._waited,
            tokens_per_second=tokens / seconds if seconds > 0 else 0.0,
        )
        self._recent.append((tokens, seconds))
        self._begin_step()
        return timing

    def eta_seconds(self, tokens_left: int) -> float | None:
        """Time for ``tokens_left`` at the speed of the recent steps; None before the first."""
        tokens = sum(each for each, _ in self._recent)
        seconds = sum(each for _, each in self._recent)
        return tokens_left * seconds / tokens if tokens else None

    def _begin_step(self) -> None:
        self._mark = self._clock()
        self._waited = 0.0
