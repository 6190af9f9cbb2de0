"""One process of the benchmark: it measures one item by one contender, when it is told to.

After its imports, and on a GPU after compiling what it can, it says ``ready`` and waits for a line. It adds
each row to a file as soon as it has it, so that what a later shape does to the process costs no earlier row.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from k3train.bench.machine import assembler, machine
from k3train.bench.place import Cannot, Case, Place, prepare
from k3train.bench.record import FAILED, MEASURED, NONE, Row
from k3train.bench.timing import ceilings, give_back, measure
from k3train.bench.work import Shape

FORWARD, BOTH = "forward", "forward + backward"
READY = "ready"
COMPILED_TOKENS = 256
"""Tokens of a document when only the compilers' caches are filled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a process is asked for."""

    item: str
    """Empty: the machine's ceilings and versions."""
    by: str
    shapes: list[dict[str, int]]
    device: str
    out: str
    settings: int = 0
    """Most settings that an autotuned kernel tries; 0: all."""
    part: int = 0
    parts: int = 1
    """Processes that share the compiling of this contender's kernels; parts above 0 do nothing else."""
    audit_bound: float | None = None
    """A gate's lower bound: audit numbers instead of measuring times."""


Make = Callable[[str, Shape, Place], Case]


def main(text: str) -> None:
    """Do the task that ``text`` holds as JSON."""
    task = Task(**json.loads(text))
    device = torch.device(task.device, 0) if task.device == "cuda" else torch.device("cpu")
    make: Make | None = None
    if task.item and task.audit_bound is None:
        make = importlib.import_module(f"k3train.bench.case_{task.item}").case
    prepare(device)
    if make is not None and device.type == "cuda":
        from k3train.bench import tuning

        _import_peer(task.by)
        assembler()  # all contenders' code goes through the same one
        tuning.limit(task.settings)
        with tuning.compiling(task.part, task.parts, launch=not task.part):
            _compile(task, make, device)
        if task.part:
            return
    print(READY, flush=True)
    if not sys.stdin.readline():
        return  # whoever would have said go is gone
    if task.audit_bound is not None:
        from k3train.bench.audit import audit

        if device.type == "cuda":
            from k3train.bench import tuning

            tuning.limit(2)  # the peer's settings: errors hardly depend on them, and the first may not fit
        found = {"audit": audit(task.shapes[0], task.audit_bound, device), "machine": machine(device)}
        Path(task.out).write_text(json.dumps(found))
    elif make is None:
        Path(task.out).write_text(json.dumps({"ceilings": ceilings(device), "machine": machine(device)}))
    else:
        with open(task.out, "a") as file:
            for shape in task.shapes:
                measure_shape(task, shape, make, device, lambda row: _add(file, row))


def _import_peer(by: str) -> None:
    """Import early what takes long; a package that is broken says so when it is measured."""
    module = {"fla": "fla.ops.kda", "automodel": "nemo_automodel.components.models.kimi_k3.model"}.get(by)
    if module is not None:
        try:
            importlib.import_module(module)
        except Exception as error:
            print(f"importing {module}: {error!r}", file=sys.stderr)


def _add(file: Any, row: Row) -> None:
    file.write(json.dumps(asdict(row)) + "\n")
    file.flush()


def _compile(task: Task, make: Make, device: torch.device) -> None:
    """One small forward and backward of each shape; what cannot be compiled here says so when measured."""
    for shape in task.shapes:
        small = dict(shape)
        if "tokens" in small and task.item != "model":
            small["tokens"] = COMPILED_TOKENS * small.get("documents", 1)
        try:
            make(task.by, small, Place(device=device, compiling=True)).both()
        except Exception as error:
            print(f"compiling {task.item} of {task.by}: {error!r}", file=sys.stderr)
        gc.collect()
        give_back(device)


def measure_shape(
    task: Task,
    shape: dict[str, int],
    make: Make,
    device: torch.device,
    add: Callable[[Row], None],
    *,
    seconds: float = 0.15,
) -> None:
    """Give ``add`` a row for each call at one shape, each timed for about ``seconds``; failures are rows."""
    place = Place(device=device)
    base = {"item": task.item, "shape": shape, "by": task.by, "dtype": str(place.dtype).split(".")[-1]}
    what = FORWARD
    try:
        case = make(task.by, shape, place)
        base |= {"routing": case.routing, "note": case.note}
        for what, call, context in _calls(case):
            add(_timed(base, what, call, context(), device, seconds))
        for what, prepare in case.trained.items():
            gc.collect()
            add(_timed(base, what, prepare(), nullcontext(), device, seconds))
    except Cannot as error:
        add(Row(**base, what=what, status=NONE, reason=str(error)))
    except Exception as error:
        add(Row(**base, what=what, status=FAILED, reason=in_words(error)))
        print(f"{task.item} by {task.by}: {error!r}", file=sys.stderr)
    case = None
    gc.collect()
    give_back(device)


Calls = list[tuple[str, Callable[[], Any], Callable[[], AbstractContextManager[Any]]]]


def _calls(case: Case) -> Calls:
    calls: Calls = [
        (FORWARD, case.forward, torch.no_grad),
        (BOTH, case.both, nullcontext),
    ]
    return calls + [(name, call, torch.no_grad) for name, call in case.parts.items()]


def _timed(
    base: dict[str, Any],
    what: str,
    call: Callable[[], Any],
    context: AbstractContextManager[Any],
    device: torch.device,
    seconds: float,
) -> Row:
    give_back(device)
    with context:
        timing = measure(call, device, seconds=seconds)
    return Row(**base, what=what, status=MEASURED, **asdict(timing))


def in_words(error: Exception) -> str:
    """An error in one line; of memory that was not to be had, only how much."""
    if amount := re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE):
        return f"out of memory: {amount[1]} more were needed"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


if __name__ == "__main__":
    code = 1
    try:
        main(sys.argv[1])
        code = 0
    except Exception as error:
        print(f"{type(error).__name__}: {error}", in_words(error), sep="\n", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of gloo and of compilers sometimes abort a process that exits normally
