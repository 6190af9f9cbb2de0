"""A process of the benchmark, as the one that started it sees it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict

from k3train.bench.record import EXPIRED
from k3train.bench.worker import READY, Task


class Process:
    """Does one task once told to, and can be ended with all that it has started."""

    def __init__(self, task: Task) -> None:
        self.task, self.late = task, False
        self.errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (lives as long as this)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "k3train.bench.worker", json.dumps(asdict(task))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            start_new_session=True,
        )
        self.ready = threading.Event()
        """Set when it has said that it waits, or has ended."""
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == READY:
                self.ready.set()
        self.ready.set()

    def go(self) -> None:
        """Let it measure as soon as it is ready."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("go\n")
            self.process.stdin.close()
        except BrokenPipeError:  # it has failed already, which its exit code says
            return

    def wait(self, seconds: float) -> str:
        """Wait for its end, at most so long; in one line, what went wrong, or nothing."""
        timer = threading.Timer(max(seconds, 0.1), self._expire)
        timer.start()
        try:
            code = self.process.wait()
        finally:
            timer.cancel()
        if self.late:
            return f"{EXPIRED} {max(seconds, 0):.3g} s"
        if code < 0:
            return f"ended by {signal.Signals(-code).name}"
        self.errors.seek(0)
        lines = [line for line in self.errors.read().splitlines() if line.strip()]
        return (lines[-1] if lines else f"exit code {code}")[:200] if code else ""

    def _expire(self) -> None:
        self.late = True
        self.kill()

    def kill(self) -> None:
        """End it, unless it has ended, and wait until it is gone with the memory that it held."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
