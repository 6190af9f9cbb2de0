"""``k3train bench``: asks one process after another for its rows within a budget, and keeps them."""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from k3train.bench.items import ITEMS, OURS, PEERS, shape_words
from k3train.bench.machine import version
from k3train.bench.process import Process
from k3train.bench.record import ABSENT, FAILED, LATE, NONE, Record, Row
from k3train.bench.worker import BOTH, FORWARD, Task
from k3train.config.problems import Unavailable

COMPILING_SHARE = 0.4
"""Of the budget, at most, goes into compiling ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked for, checked."""

    shapes: dict[str, list[dict[str, int]]]
    """Of every item to be measured."""
    peers: list[str]
    """Names from ``PEERS``, in the order of the table."""
    device: str
    """cuda or cpu."""
    budget_seconds: float
    item_seconds: float
    """Most that one process may take."""
    settings: int
    """Most settings that an autotuned kernel tries; 0: all."""
    command: str
    audit_bound: float | None = None


def run(request: Request, out: Path) -> Record:
    """Measure everything, writing ``out`` after each process, and return what is in it."""
    deadline = time.monotonic() + request.budget_seconds
    record = Record(made={"date": datetime.date.today().isoformat(), "command": request.command})
    with TemporaryDirectory(prefix="k3train-bench-") as folder:
        first = Task(item="", by="", shapes=[], device=request.device, out=f"{folder}/first.json")
        if request.audit_bound is not None:
            shape = request.shapes["kda"][0]
            first = replace(first, item="kda", shapes=[shape], audit_bound=request.audit_bound)
        tasks = [] if request.audit_bound is not None else _tasks(record, request, Path(folder))
        started = _start_all([first, *tasks], request) if request.device == "cuda" else {}
        try:
            found = _ask(started.get(first.out) or Process(first), request)
            record.made["machine"] = found["machine"]
            record.audit, record.ceilings = found.get("audit"), found.get("ceilings", {})
            for rows in _measure(tasks, started, request, deadline):
                record.rows += [set_against_floor(row, record.ceilings) for row in rows]
                record.write(out)
            record.write(out)
        finally:
            for process in started.values():
                process.kill()
    return record


def set_against_floor(row: Row, ceilings: dict[str, float]) -> Row:
    """Fill in what follows from a row's time, its counted work and the two ceilings."""
    if row.ms is None or row.what.split(" into ")[0] not in (FORWARD, BOTH):
        return row
    forward, backward = ITEMS[row.item].count(row.shape, 2 if row.dtype == "bfloat16" else 4)
    work = forward if row.what == FORWARD else forward + backward
    row.floor_ms = work.floor_ms(**ceilings)
    row.ratio = row.ms / row.floor_ms
    row.tflop_s, row.gb_s = work.flops / row.ms / 1e9, work.bytes / row.ms / 1e6
    return row


def _ask(process: Process, request: Request) -> dict:
    """What a process writes that must succeed."""
    process.go()
    trouble = process.wait(request.budget_seconds)
    if process.late:
        raise Unavailable(
            f"--budget {request.budget_seconds:g} was over before anything was measured; give more seconds"
        )
    if trouble and request.audit_bound is not None:
        words = shape_words(process.task.shapes[0])
        raise Unavailable(f"{words} could not be audited: {trouble}; try smaller sizes with --shape")
    if trouble:
        raise Unavailable(f"this machine could not be measured: {trouble}")
    return json.loads(Path(process.task.out).read_text())


def _tasks(record: Record, request: Request, folder: Path) -> list[Task]:
    """One a process; contenders that have nothing to measure get their rows at once."""
    tasks = []
    for item, shapes in request.shapes.items():
        for by in (OURS, *request.peers):
            task = Task(
                item=item,
                by=by,
                shapes=shapes,
                device=request.device,
                out=str(folder / f"{item}-{by}.jsonl"),
                settings=request.settings,
            )
            if missing := _missing(item, by):
                record.rows += _unmeasured(task, *missing, [(shape, FORWARD) for shape in shapes])
            else:
                tasks.append(task)
    return tasks


def _missing(item: str, by: str) -> tuple[str, str] | None:
    """Status and reason of a contender that cannot be asked."""
    if by == OURS:
        return None
    if by not in ITEMS[item].peers:
        return NONE, f"{PEERS[by]} has no such part of its own"
    if version(PEERS[by]) is None:
        return ABSENT, f"the package {PEERS[by]} is not installed"
    return None


def _start_all(tasks: list[Task], request: Request) -> dict[str, Process]:
    """Let all processes import and compile at once, before the first one measures; by their output file.

    A process that is not ready in time is ended, since it would keep the device's memory from those that
    measure. Another one takes its turn, after all others, and finds what has been compiled.
    """
    began, cores = time.monotonic(), os.cpu_count() or 1
    started, helpers = {}, []
    for task in tasks:
        many = task.item == "kda" and task.by == "fla"  # a dozen kernels of up to eighteen settings each
        parts = max(1, cores // 2) if many else 1
        started[task.out] = Process(replace(task, parts=parts))
        helpers += [Process(replace(task, part=part, parts=parts)) for part in range(1, parts)]
    try:
        for process in (*started.values(), *helpers):
            process.ready.wait(
                max(0.0, COMPILING_SHARE * request.budget_seconds - (time.monotonic() - began))
            )
    finally:
        late = [process for process in started.values() if not process.ready.is_set()]
        for process in (*helpers, *late):
            process.kill()
    count, seconds = len(started) + len(helpers), time.monotonic() - began
    rest = "".join(f"; {process.task.item} of {process.task.by} not yet" for process in late)
    print(f"{count} processes compiled for {seconds:.0f} s{rest}", flush=True)
    return {out: process for out, process in started.items() if process not in late}


def _measure(
    tasks: list[Task], started: dict[str, Process], request: Request, deadline: float
) -> Iterator[list[Row]]:
    """Rows of one process after another; only one of them measures at any time."""
    for task in sorted(tasks, key=lambda task: task.out not in started):  # those that are ready first
        left = deadline - time.monotonic()
        trouble, late = f"the budget of {request.budget_seconds:.0f} s was used up", True
        if left >= 1:
            process = started.get(task.out) or Process(task)
            try:
                process.go()
                trouble = process.wait(min(left, request.item_seconds))
                late = process.late and left < request.item_seconds
            finally:
                process.kill()
        rows = _rows(task)
        if trouble:
            done = {(str(row.shape), row.what) for row in rows}
            lost = [(s, w) for s in task.shapes for w in (FORWARD, BOTH) if (str(s), w) not in done]
            rows += _unmeasured(task, LATE if late else FAILED, trouble, lost)
        print(_progress(task, rows), flush=True)
        yield rows


def _unmeasured(task: Task, status: str, reason: str, calls: list[tuple[dict[str, int], str]]) -> list[Row]:
    return [
        Row(item=task.item, shape=shape, by=task.by, what=what, status=status, reason=reason)
        for shape, what in calls
    ]


def _rows(task: Task) -> list[Row]:
    path = Path(task.out)
    lines = path.read_text().splitlines() if path.is_file() else []
    return [Row(**json.loads(line)) for line in lines if line.endswith("}")]


def _progress(task: Task, rows: list[Row]) -> str:
    seen = [f"{row.ms:.3f} ms" if row.ms is not None else f"{row.status}: {row.reason}" for row in rows]
    return f"{task.item} by {task.by}: {', '.join(seen)}"
