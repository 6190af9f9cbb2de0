"""Starts drilled runs under the real supervisor and compares them with an uninterrupted one."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

from k3train.config.compose import replace_resolved, save_resolved
from k3train.config.schema import Run
from k3train.drill.rank import rank
from k3train.drill.tiny import make_corpus, tiny_run
from k3train.drill.watch import Watch
from k3train.monitor.metrics_file import METRICS, read_records
from k3train.train.launch import launch
from k3train.train.supervisor import EVENTS

WARM = "k3train.drill.rank"


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What one start of a run came to, until its supervisor ended."""

    run: Run
    code: int
    seconds: float
    happened: list[dict[str, Any]]
    """Faults, as k3train.faults records them."""
    failures: list[dict[str, Any]]
    """Failures, as the supervisor records them."""
    looks: int
    without: int
    """Looks at the checkpoints, and those that found no good one although there had been one."""
    orphans: int
    """Ranks that outlived their supervisor."""
    output: str
    """What ranks and supervisor have printed."""

    def detect_seconds(self) -> list[float]:
        """From each fault that a failure followed to the moment when the supervisor noticed."""
        noticed = {failure["start"]: failure["noticed"] for failure in self.failures}
        last = {fault["restart"]: fault["monotonic"] for fault in self.happened}
        return [noticed[start] - moment for start, moment in last.items() if start in noticed]


@dataclass(kw_only=True, slots=True)
class Trained:
    """What a run's record says that it trained."""

    losses: list[tuple[int, str]]
    """Step and loss of every recorded step of every attempt, the loss exactly (hexadecimal)."""
    evals: list[tuple[int, str, str]]
    """Step, held-out set at context length, loss."""
    starts: list[tuple[int, int, int]]
    """Of each attempt after the first: newest checkpoint announced, last step before, where it went on."""
    events: list[dict[str, Any]]

    def differ_from(self, golden: Trained, *, stopped: bool = False) -> int:
        """Steps and evaluations that are not in the golden run exactly so, and those that are missing.

        A run that was ``stopped`` may have given an evaluation up for it.
        """
        steps, evals = set(golden.losses), set(golden.evals)
        wrong = sum(each not in steps for each in self.losses) + sum(e not in evals for e in self.evals)
        missing = set() if stopped else evals - set(self.evals)
        return wrong + len(steps - set(self.losses)) + len(missing)

    def named(self, event: str) -> list[dict[str, Any]]:
        """Events of this name."""
        return [each for each in self.events if each["event"] == event]

    def lost_checkpoints(self) -> int:
        """Starts that went on from an older checkpoint than the newest announced one."""
        return sum(went_on < announced for announced, _, went_on in self.starts)

    def lost_steps(self) -> int:
        """Most steps that one start had to train again."""
        return max((last - went_on for _, last, went_on in self.starts), default=0)


def read_trained(run: Run) -> Trained:
    """What ``metrics.jsonl`` of a run says."""
    records = list(read_records(Path(run.dir) / METRICS))
    starts = []
    announced = last = 0
    attempt = None
    for record in records:
        if record["kind"] == "event" and record["event"] in ("stage_start", "resume"):
            if attempt not in (None, record["attempt"]):
                starts.append((announced, last, record["step"]))
            attempt = record["attempt"]
            last = record["step"]
        elif record["kind"] == "event" and record["event"] == "checkpoint":
            announced = record["step"]
        elif record["kind"] == "step":
            last = record["step"]
    return Trained(
        losses=[(r["step"], r["loss"].hex()) for r in records if r["kind"] == "step"],
        evals=[
            (r["step"], f"{r['heldout']}@{r['context_tokens']}", r["loss"].hex())
            for r in records
            if r["kind"] == "eval"
        ],
        starts=starts,
        events=[r for r in records if r["kind"] == "event"],
    )


@dataclass(kw_only=True, slots=True)
class Bench:
    """A folder with a corpus, golden runs and the runs that are drilled."""

    folder: Path
    seed: int
    golden: dict[str, Trained] = field(default_factory=dict)
    count: int = 0

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        make_corpus(self.corpus / "train", documents=400, seed=1)
        make_corpus(self.corpus / "heldout", documents=40, seed=2)
        multiprocessing.get_context("forkserver").set_forkserver_preload([WARM])

    @property
    def corpus(self) -> Path:
        """Folder of the two corpora."""
        return self.folder / "corpus"

    def new_run(self, layout: str, **options: Any) -> Run:
        """A run that has not started."""
        self.count += 1
        return tiny_run(self.folder / f"run-{self.count:03d}", self.corpus, layout, **options)

    def copy_run(self, run: Run, layout: str, **options: Any) -> Run:
        """A run of this layout that goes on from what another one has saved and recorded so far."""
        other = self.new_run(layout, **options)
        shutil.copytree(
            run.dir, other.dir, ignore=shutil.ignore_patterns("run.yaml", "logs", "lock", EVENTS, "*.log")
        )
        return other

    def expected(self, layout: str) -> Trained:
        """What an uninterrupted run of this layout trains; it runs at the first call."""
        if layout not in self.golden:
            run = self.new_run(layout)
            outcome = self.start(run)
            if outcome.code:
                raise RuntimeError(f"the run without a fault ended with {outcome.code}:\n{outcome.output}")
            self.golden[layout] = read_trained(run)
        return self.golden[layout]

    def start(self, run: Run, faults: list[dict[str, Any]] | None = None) -> Outcome:
        """Start a run, or go on with one, under these faults; returns when its supervisor has ended."""
        folder = Path(run.dir)
        folder.mkdir(exist_ok=True)
        resolved = folder / "run.yaml"
        (replace_resolved if resolved.exists() else save_resolved)(run, resolved)
        plan, log = folder / "plan.json", folder / "faults.jsonl"
        plan.write_text(json.dumps({"faults": faults or [], "log": str(log)}))
        for left in (log, folder / EVENTS, folder / "supervisor.log"):
            left.unlink(missing_ok=True)
        shutil.rmtree(folder / "logs", ignore_errors=True)
        began = time.monotonic()
        with (
            Watch(folder / "checkpoints") as watch,
            (folder / "supervisor.log").open("a") as said,
            contextlib.redirect_stderr(said),
        ):
            logs = DefaultLogsSpecs(log_dir=str(folder / "logs"), redirects=Std.ALL)
            code = launch(run, resolved, forked=rank, arguments=(str(resolved), str(plan)), logs=logs)
        return Outcome(
            run=run,
            code=code,
            seconds=time.monotonic() - began,
            happened=_lines(log),
            failures=[each for each in _lines(folder / EVENTS) if each["event"] == "failed"],
            looks=watch.looks,
            without=watch.without,
            orphans=_ranks_alive(),
            output=_printed(folder),
        )


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _printed(folder: Path) -> str:
    files = [folder / "supervisor.log", *sorted((folder / "logs").rglob("std*.log"))]
    return "\n".join(text for file in files if (text := file.read_text(errors="replace").strip()))


def _ranks_alive() -> int:
    """Children of the fork server: ranks that still run after their supervisor has ended."""
    servers = [
        child for child in psutil.Process().children() if any("forkserver" in word for word in _words(child))
    ]
    return sum(len(server.children()) for server in servers)


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
