"""Ends a run that hangs: when a section takes far longer than ever before, every rank writes its stacks.

Ranks that wait for a hung one are late as well, so each finds out by itself; a folder that the first one
makes calls the others. Nothing is exchanged, and no file is touched, while all goes well.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from k3train.config.json_file import parse_json
from k3train.config.schema import Run
from k3train.train.signals import EXIT_HUNG

STACKS = "stacks"
"""Folder in the run's folder; each alarm has a folder in it with one file a rank."""

SAVE, SAVE_START = "save", "start of a save"
SAVE_WAIT = "wait for a save"
"""A section without experience: a pending save is seldom waited for, and as long as its disk wants."""

_MEMORY = 32
"""Durations of a section that are remembered."""
_FACTOR = 10
"""How many times its longest duration a section may take."""
_ANSWER_SECONDS = 10.0
"""How long the ranks of an alarm wait for each other's stacks."""
_BACKSTOP_SECONDS = 120.0
"""How much later the interpreter itself ends a rank whose watchdog cannot run."""
_INNERMOST = 6
"""Frames in which a wait for other ranks shows."""
_PATIENCE = 0.9
"""Share of a collective's timeout after which a wait in it is a hang: its own end would tell nothing."""

type Place = tuple[int, int]
"""A frame and an instruction in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Where a rank stood when the alarm was raised."""

    rank: int
    host: str
    sections: int
    """Sections entered since the start: a clock that all ranks share."""
    section: str
    step: int
    seconds: float
    """Time in this section."""
    waits: bool
    """Whether the main thread is inside torch.distributed."""
    where: str
    """Innermost line of k3train in the main thread."""


class Watchdog:
    """Watches one rank from a thread of its own; ``enter`` tells it what the rank does now."""

    def __init__(self, run: Run) -> None:
        """Every rank must call this."""
        self.tell: Callable[[str, int, Path], None] | None = None
        """Called once, before the end, on the rank that speaks for all: sentence, step, folder."""
        self._floor, self._ceiling = run.guards.hang_floor_seconds, run.guards.hang_ceiling_seconds
        self._longest_wait = _PATIENCE * run.cluster.collective_timeout_seconds
        self._waits_at: Place | None = None
        self._waits_since = 0.0
        start: list[str] = [f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"]
        dist.broadcast_object_list(start)
        self._folder = Path(run.dir) / STACKS / start[0]
        self._past: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_MEMORY))
        self._sections, self._section, self._step = 0, "", 0
        self._since = time.monotonic()
        self._limit = float("inf")
        self._main = threading.get_ident()
        self._closed = threading.Event()
        if self._ceiling:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def enter(self, section: str, step: int) -> None:
        """Begin verification, setup, step, evaluation, save or wait for one; the section before is over.

        A setup forgets the past: another stage takes another time.
        """
        now = time.monotonic()
        if section == "setup":
            self._past.clear()
        elif self._section not in ("setup", SAVE_WAIT):
            self._past[self._section].append(now - self._since)
        past = self._past[section]
        # In this order: the thread may look at any moment.
        self._limit = float("inf")
        self._sections, self._section, self._step, self._since = self._sections + 1, section, step, now
        self._limit = self._allowed(past)
        if self._ceiling:
            faulthandler.dump_traceback_later(
                self._limit + _BACKSTOP_SECONDS, exit=True, file=sys.__stderr__ or 2
            )

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        faulthandler.cancel_dump_traceback_later()

    def _allowed(self, past: deque[float]) -> float:
        if not self._ceiling:
            return float("inf")
        learned = _FACTOR * max(past) if past else self._ceiling
        return min(max(learned, self._floor), self._ceiling)

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, self._floor / 4)):
            elapsed, limit = time.monotonic() - self._since, self._limit
            # A rank that waits for a hung one is late itself, so the others' call is looked for only then.
            early = min(limit, self._floor, self._longest_wait) / 2
            called = elapsed > early and self._folder.exists()
            if elapsed > limit or self._waited() > self._longest_wait or called:
                self._end(elapsed)

    def _waited(self) -> float:
        """Seconds that the main thread has been in one and the same wait for other ranks."""
        frames = self._frames()
        place = (id(frames[0]), frames[0].f_lasti) if _waits(frames) else None
        now = time.monotonic()
        if place is None or place != self._waits_at:
            self._waits_at, self._waits_since = place, now
        return now - self._waits_since

    def _frames(self) -> list[FrameType]:
        """The main thread's frames, innermost first."""
        frame, frames = sys._current_frames().get(self._main), []
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        return frames

    def _end(self, elapsed: float) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._write_stacks(self._report(rank, elapsed))
        deadline = time.monotonic() + _ANSWER_SECONDS
        while len(reports := read_reports(self._folder)) < world and time.monotonic() < deadline:
            time.sleep(0.1)
        summary = self._folder / "summary.txt"
        if rank == min(report.rank for report in reports):
            sentence = who_is_behind(reports, world)
            print(
                f"hung: {sentence}; the stacks of all ranks are in {self._folder}",
                file=sys.stderr,
                flush=True,
            )
            if self.tell is not None:
                # The main thread may hold what this needs.
                words = (sentence, self._step, self._folder)
                speaker = threading.Thread(target=self.tell, args=words, daemon=True)
                speaker.start()
                speaker.join(2.0)
            summary.write_text(sentence + "\n")
        while not summary.exists() and time.monotonic() < deadline + 3:
            time.sleep(0.1)
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(EXIT_HUNG)

    def _report(self, rank: int, elapsed: float) -> Report:
        frames = self._frames()
        ours = next((f for f in frames if f"{os.sep}k3train{os.sep}" in f.f_code.co_filename), None)
        shown = ours or (frames[0] if frames else None)
        return Report(
            rank=rank,
            host=socket.gethostname(),
            sections=self._sections,
            section=self._section,
            step=self._step,
            seconds=round(elapsed, 1),
            waits=_waits(frames),
            where=f"{shown.f_code.co_filename}:{shown.f_lineno} in {shown.f_code.co_name}" if shown else "?",
        )

    def _write_stacks(self, report: Report) -> None:
        partial = self._folder / f".rank_{report.rank:05d}"
        with partial.open("w") as file:
            file.write(json.dumps(asdict(report)) + "\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        partial.rename(self._folder / f"rank_{report.rank:05d}.txt")


def read_reports(folder: Path) -> list[Report]:
    """What the ranks of an alarm have written so far, by rank."""
    paths = sorted(folder.glob("rank_*.txt"))
    return [Report(**parse_json(path.read_text().partition("\n")[0])) for path in paths]


def who_is_behind(reports: list[Report], world: int) -> str:
    """One sentence that names the rank which the others wait for, as far as it can be told."""
    silent = sorted(set(range(world)) - {report.rank for report in reports})
    if silent:
        ranks = f"rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
        return f"{ranks} did not answer: frozen, or gone with the machine"
    fewest = min(report.sections for report in reports)
    busy = [report for report in reports if not report.waits]
    behind = [r for r in busy if r.sections == fewest] or busy or [r for r in reports if r.sections == fewest]
    told = "; ".join(
        f"rank {r.rank} on {r.host} is {r.seconds:.0f} s in {r.section} of step {r.step}, at {r.where}"
        for r in behind[:3]
    )
    if len(behind) == len(reports) > 1:
        return f"no rank stands out: {told}"
    return f"{told}, and the others wait for it"


def _waits(frames: list[FrameType]) -> bool:
    return any("torch/distributed/" in frame.f_code.co_filename for frame in frames[:_INNERMOST])
