"""Watches a run's checkpoints from outside: from the first on, a good one must exist at every instant."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import TracebackType

from k3train.checkpoint.listing import committed
from k3train.checkpoint.manifest import CheckpointError, check_files, read_manifest


def is_good(path: Path) -> bool:
    """Whether every byte of a checkpoint is as it was written."""
    try:
        manifest = read_manifest(path)
        check_files(path, manifest, manifest.files)
    except (CheckpointError, OSError):
        return False
    return True


class Watch:
    """Looks again and again in a thread while the block runs."""

    def __init__(self, directory: Path, *, every_seconds: float = 0.05) -> None:
        self.looks = 0
        self.without = 0
        """Looks that found no good checkpoint after an earlier one had."""
        self._directory, self._every = directory, every_seconds
        self._seen = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._look()

    def _look_on(self) -> None:
        while not self._ended.wait(self._every):
            self._look()

    def _look(self) -> None:
        self.looks += 1
        found = self._find()
        self._seen |= found
        self.without += self._seen and not found

    def _find(self) -> bool:
        # A checkpoint may be pruned while it is read; then the list has changed, and only then.
        while True:
            listed = [path for _, path in committed(self._directory)]
            if any(is_good(path) for path in listed):
                return True
            if listed == [path for _, path in committed(self._directory)]:
                return False
            time.sleep(0)
