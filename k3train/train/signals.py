"""Stopping a run so that it can go on: signals, the stop file, the time limit, and the ranks' agreement."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Literal

import torch
import torch.distributed as dist

from k3train.checkpoint.trust import owned_by_us
from k3train.config.schema import Run
from k3train.train.claim import STOP_FILE

EXIT_DONE = 0
EXIT_UNEXPECTED = 1
EXIT_BAD_INPUT = 2
EXIT_ENVIRONMENT = 3
EXIT_HARDWARE = 16
"""A step or the state at rest came out differently on one rank: suspect its machine, go on without it."""
EXIT_BAD_STEP = 17
"""A step was refused and came out the same when computed again: a restart would meet it again."""
EXIT_HUNG = 18
"""A section took far too long; the stacks of all ranks lie in the run's folder. Start again."""
EXIT_STOPPED = 75
"""The run was asked to stop, has saved, and goes on when it is started again (sysexits' EX_TEMPFAIL)."""

END_TIME = "K3TRAIN_END_TIME"
"""Environment variable: the second since 1970 at which ranks must have ended, however often they start."""
_SLURM_END_TIME = "SLURM_JOB_END_TIME"

type Timed = Literal["step", "pass", "save"]
"""What time is counted as."""

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """Whether this rank has been asked to stop. Ranks agree on it in the step's one small all-reduce.

    A second SIGINT or SIGTERM ends the process at once, for the impatient.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        seconds_left: float | None = None,
        margin_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watch for signals, for ``run_dir/STOP``, and for a time limit ``seconds_left`` from now (None:
        no limit), before which ``margin_seconds`` and the time of a step and a save are kept free."""
        self.reason: str | None = None
        self._file, self._warned = run_dir / STOP_FILE, False
        self._clock = clock
        self._deadline = None if seconds_left is None else clock() + seconds_left
        self._margin = margin_seconds
        self._longest: dict[Timed, float] = {"step": 0.0, "pass": 0.0, "save": 0.0}
        self._timed: Timed = "step"
        self._since: float | None = None
        # Ranks have sessions of their own: nothing else tells them that torch's agent was killed.
        self._agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._previous = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.reason is not None and number != signal.SIGUSR1:
            self.restore()
            signal.raise_signal(number)
        self.reason = signal.Signals(number).name

    def poll(self) -> bool:
        """Whether this rank wants to stop now; cheap enough for every step and every evaluation batch."""
        now = self._clock()
        self._count(now)
        self._since = now
        if self.reason is None and _is_first_rank() and self._may_ask():
            self.reason = self._who_asks()
        if (
            self.reason is None
            and self._deadline is not None
            and now + self.needed_seconds() > self._deadline
        ):
            self.reason = "the time limit is near"
        if self.reason is None and self._agent is not None and os.getppid() != self._agent:
            self.reason = "the process that started the ranks is gone"
        return self.reason is not None

    def _who_asks(self) -> str:
        """The signal that the launcher noted in the stop file, else that the file is there."""
        try:
            noted = self._file.read_bytes()[:16].decode(errors="replace").strip()
        except OSError:
            noted = ""
        return noted if noted in (number.name for number in _SIGNALS) else f"{self._file} exists"

    def _may_ask(self) -> bool:
        """Whether the stop file is there and ours: see ``owned_by_us``."""
        try:
            ours = owned_by_us(self._file)
        except OSError:
            return False
        if not ours and not self._warned:
            self._warned = True
            logger.warning("%s is another user's file and is not obeyed", self._file)
        return ours

    def needed_seconds(self) -> float:
        """Time that must be left before the limit to go on. A stop is seen after the step, or the pass of an
        evaluation, in progress, and carried out after a step more, with a save; all as long as the longest so
        far."""
        longest = self._longest
        return self._margin + max(longest["step"], longest["pass"]) + longest["step"] + longest["save"]

    @contextlib.contextmanager
    def pause(self, goes_to: Timed = "save") -> Iterator[None]:
        """Time within it goes to a save, or loading, or to passes of an evaluation, which end at each poll,
        and not to a step; the longest is remembered."""
        before = self._clock()
        self._count(before)
        self._timed, self._since = goes_to, before
        try:
            yield
        finally:
            self._count(self._clock())
            self._timed = "step"

    def _count(self, now: float) -> None:
        if self._since is not None:
            self._longest[self._timed] = max(self._longest[self._timed], now - self._since)
        self._since = None

    def clear_file(self) -> None:
        """Remove the stop file, once the stop is carried out; rank 0 only: others might remove the next."""
        if _is_first_rank():
            self._file.unlink(missing_ok=True)

    def restore(self) -> None:
        """Give the signals back to whoever handled them before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def any_wants_stop(stop: StopRequest, device: torch.device) -> bool:
    """Whether any rank was asked to stop, in one all-reduce. Every rank must call this."""
    asked = torch.tensor(float(stop.poll()), device=device)
    dist.all_reduce(asked, op=dist.ReduceOp.MAX)
    return asked.item() > 0


def seconds_left(run: Run) -> float | None:
    """Time until ranks that start now must have ended, in seconds; None without a limit.

    Slurm says when its job ends. Elsewhere the launcher says so; ranks started by hand have
    ``cluster.time_limit_minutes`` from now on. Wall clocks are read here, once, and nowhere else.
    """
    limits = [60.0 * run.cluster.time_limit_minutes] if run.cluster.time_limit_minutes else []
    for name in (_SLURM_END_TIME, END_TIME):
        text = os.environ.get(name, "")
        if text.isdecimal():
            return min([float(text) - time.time(), *(limits if name == _SLURM_END_TIME else ())])
    return limits[0] if limits else None


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
