"""Stopping a run so that it can go on: signals, the stop file, the time limit, and the ranks' agreement."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType

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

STOP_FILE = "STOP"
"""Name of the file in the run directory that asks a run to stop: launchers make it, ranks look for it."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """Whether this rank has been asked to stop. Ranks agree on it in the step's one small all-reduce.

    A second SIGINT or SIGTERM ends the process at once, for the impatient.
    """

    def __init__(self, run_dir: Path, *, deadline_seconds: float | None = None) -> None:
        """Watch for signals, for ``run_dir/STOP``, and for ``deadline_seconds`` from now (None: no limit)."""
        self.reason: str | None = None
        self._file = run_dir / STOP_FILE
        self._deadline = None if deadline_seconds is None else time.monotonic() + deadline_seconds
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
        if self.reason is None and self._file.exists():
            self.reason = f"{self._file} exists"
        if self.reason is None and self._deadline is not None and time.monotonic() > self._deadline:
            self.reason = "the time limit is near"
        if self.reason is None and self._agent is not None and os.getppid() != self._agent:
            self.reason = "the process that started the ranks is gone"
        return self.reason is not None

    def clear_file(self) -> None:
        """Remove the stop file, once the stop is carried out or a new run begins (rank 0 only)."""
        self._file.unlink(missing_ok=True)

    def restore(self) -> None:
        """Give the signals back to whoever handled them before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
