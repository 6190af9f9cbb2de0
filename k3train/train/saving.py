"""When a save may go on beside training, and what becomes of one that fails."""

from __future__ import annotations

import logging
import time
from copy import copy
from pathlib import Path

import torch.distributed as dist

from k3train.checkpoint.manifest import CheckpointNotWritten
from k3train.checkpoint.save import PendingSave, Save, begin_save, save_checkpoint
from k3train.config.schema import OnSpike, Run, WhenBusy
from k3train.config.trained import CHECKPOINTS
from k3train.train.progress import Progress
from k3train.train.report import Report
from k3train.train.resume import train_state
from k3train.train.setup import StageSetup
from k3train.train.watchdog import SAVE, SAVE_START, SAVE_WAIT, Watchdog

_LONGEST_PAUSE_SECONDS = 60.0

logger = logging.getLogger(__name__)


class Saver:
    """The saves of a run. Every rank has one, and all ranks must call each method but ``close``.

    At most one save is pending. A save that fails is reported and training goes on, until as many in a row as
    ``checkpoint.max_failures`` have failed; then CheckpointNotWritten is raised.
    """

    def __init__(self, run: Run, report: Report, watch: Watchdog) -> None:
        self._run, self._report, self._watch = run, report, watch
        self._pending: PendingSave | None = None
        self._pending_of: Progress | None = None
        self._failures = 0

    def save(self, setup: StageSetup, progress: Progress, *, milestone: bool) -> Path | None:
        """Save this moment, beside training when ``checkpoint.asynchronous``; returns the checkpoint, or None
        while it is pending, left out or failed."""
        if self._pending and self._run.checkpoint.when_busy is WhenBusy.skip:
            self.poll()
        if self._pending and self._run.checkpoint.when_busy is WhenBusy.skip:
            self._report.save_skipped(progress)
            return None
        self.finish()
        self._watch.enter(SAVE_START if self._run.checkpoint.asynchronous else SAVE, progress.step)
        moment = self._moment(setup, progress, milestone=milestone)
        try:
            if self._run.checkpoint.asynchronous:
                self._pending, self._pending_of = begin_save(moment), copy(progress)
                return None
            path = save_checkpoint(moment)
        except CheckpointNotWritten as error:
            self._failed(progress, error)
            return None
        self._saved(progress, path)
        return path

    def save_now(self, setup: StageSetup, progress: Progress, *, milestone: bool) -> Path:
        """Save this moment and return its checkpoint: training cannot go on without it.

        A save that fails is tried again after a pause, which grows.
        """
        self.finish()
        while True:
            self._watch.enter(SAVE, progress.step)
            try:
                path = save_checkpoint(self._moment(setup, progress, milestone=milestone))
            except CheckpointNotWritten as error:
                self._failed(progress, error)
                time.sleep(min(2.0**self._failures, _LONGEST_PAUSE_SECONDS))
            else:
                self._saved(progress, path)
                return path

    def poll(self) -> None:
        """Commit the pending save when every rank's files are there, and report it; call it every step."""
        self._settle(wait=False)

    def finish(self) -> None:
        """Wait for the pending save, however slow its disk is."""
        if self._pending and self._pending_of:
            self._watch.enter(SAVE_WAIT, self._pending_of.step)
        self._settle(wait=True)

    def close(self) -> None:
        """Give the pending save up."""
        if self._pending:
            self._pending.end()
            self._pending = None

    def _settle(self, *, wait: bool) -> None:
        if self._pending is None:
            return
        assert self._pending_of is not None
        try:
            path = self._pending.wait() if wait else self._pending.poll()
        except CheckpointNotWritten as error:
            self._pending = None
            self._failed(self._pending_of, error)
            return
        if path is not None:
            self._pending = None
            self._saved(self._pending_of, path)

    def _saved(self, progress: Progress, path: Path) -> None:
        self._failures = 0
        self._report.saved(progress, path)

    def _failed(self, progress: Progress, error: CheckpointNotWritten) -> None:
        self._failures += 1
        allowed = self._run.checkpoint.max_failures
        self._report.save_failed(progress, str(error), self._failures)
        if self._failures >= allowed:
            raise CheckpointNotWritten(
                f"{error}. {self._failures} saves in a row failed (checkpoint.max_failures = {allowed}): "
                "the run ends. Make room or repair the disk, and start it again"
            ) from error
        if dist.get_rank() == 0:
            logger.warning(
                "NO CHECKPOINT: %s. Failed saves in a row: %d; the run ends at %d",
                error,
                self._failures,
                allowed,
            )

    def _moment(self, setup: StageSetup, progress: Progress, *, milestone: bool) -> Save:
        guards = setup.run.guards
        return Save(
            directory=checkpoints(setup.run),
            chunks=setup.chunks,
            optimizer=setup.optimizer,
            train_state=train_state(setup, progress),
            groups=setup.groups,
            keep=setup.run.checkpoint.keep,
            milestone=milestone,
            reach=guards.rollback_steps if guards.spike is OnSpike.rollback else 0,
        )


def checkpoints(run: Run) -> Path:
    """Folder of the run's checkpoints."""
    return Path(run.dir) / CHECKPOINTS
