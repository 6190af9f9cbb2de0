"""Training steps of ``experiment=proxy_gpu`` by length and settings: time, peak memory; the table comes last.

    python tests/gpu/run_long.py [--steps N] [--limit SECONDS] CASE ...

A case is ``TOKENS override ...``, or ``DOCUMENTSxTOKENS override ...``, as one argument; cases joined by
``;`` share a process, which saves its start. Documents are of random ids over the whole vocabulary. Each case
compiles on one short document, trains one step, and is timed on N more (default 5), or as many as it says
itself: ``TOKENS*N override ...``. An estimate is that of
``k3train show``. Memory of the host is what the machine has less during the case.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

GIB, SHORT = 2**30, 4096
COLUMNS = ("case", "estimate", "before", "peak", "reserved", "host", "ms", "tokens/s", "loss")


def available() -> int:
    """Bytes of the host's memory that programs may take."""
    line = next(x for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024


def child(cases: list[str], steps: int) -> None:
    """Run cases in this process; a line of JSON each."""
    import torch

    from k3train.backend.start import end_process, seed_everything, start_backend, start_processes
    from k3train.config.schema import Device
    from k3train.train.setup import close_stage

    device = start_backend(Device.cuda)
    start_processes(device, timeout_seconds=600)
    for case in cases:
        seed_everything(1)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        result: dict[str, Any] = {"case": case}
        setups: list[Any] = []
        try:
            measure(case, steps, device, result, setups)
        except torch.cuda.OutOfMemoryError as error:
            result["loss"] = f"out of memory: {str(error).split('.')[1].strip()}"
        result["peak"] = torch.cuda.max_memory_allocated() / GIB
        result["reserved"] = torch.cuda.max_memory_reserved() / GIB
        print("result", json.dumps(result), flush=True)
        for setup in setups:
            close_stage(setup)
    end_process(0)


def measure(case: str, steps: int, device: Any, result: dict[str, Any], setups: list[Any]) -> None:
    """Build, compile, train."""
    import torch

    from k3train.bench.case_model import random_documents
    from k3train.config.compose import compose
    from k3train.curriculum.stages import stage_table
    from k3train.optim.build import allocate_state
    from k3train.optim.memory import stage_memory
    from k3train.train.progress import Progress
    from k3train.train.schedule import run_micro_batches, zero_gradients
    from k3train.train.setup import build_stage
    from k3train.train.step import train_step

    words, *overrides = case.split()
    size, _, own = words.partition("*")
    steps = int(own or steps)
    documents, tokens = (int(x) for x in size.split("x")) if "x" in size else (1, int(size))
    run = compose(["experiment=proxy_gpu", *overrides])
    table, progress, free = stage_table(run), Progress(), available()
    stage = replace(table[0].stage, context_tokens=documents * tokens)
    result["estimate"] = stage_memory(run, replace(table[0], stage=stage)).total / GIB
    setups.append(setup := build_stage(run, table, table[0], progress, device))
    allocate_state(setup.optimizer)
    result["before"] = torch.cuda.memory_allocated() / GIB
    run_micro_batches(setup, [random_documents(SHORT, 1, run.model.vocab_size)], backward=True)
    setup.routers.discard()
    zero_gradients(setup)
    batch = random_documents(tokens, documents, run.model.vocab_size)
    times, losses = [], []
    for i in range(1 + steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step = train_step(setup, progress, [batch], wants_stop=False)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
        losses.append(step.loss)
        print(f"{case}: step {i + 1}, {times[-1]:.0f} ms, loss {step.loss:.4f}, norm {step.grad_norm:.3f}, "
              f"peak {torch.cuda.max_memory_allocated() / GIB:.1f} GiB", flush=True)  # fmt: skip
        result["host"] = max(result.get("host", 0.0), (free - available()) / GIB)
    timed = times[1:] or times
    result["ms"] = f"{statistics.median(timed):.1f} ({min(timed):.1f} to {max(timed):.1f})"
    result["tokens/s"] = f"{1e3 * documents * tokens / statistics.median(timed):,.0f}"
    result["loss"] = f"{losses[0]:.3f} to {losses[-1]:.3f}"


def main() -> None:
    """Run each group of cases in a process of its own, within its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--limit", type=int, default=300, help="seconds of a group of cases")
    parser.add_argument("--child", action="store_true")
    parser.add_argument("cases", nargs="+")
    options = parser.parse_args()
    if options.child:
        child(options.cases, options.steps)
    rows: list[dict[str, Any]] = []
    for group in options.cases:
        cases = [each.strip() for each in group.split(";")]
        command = [sys.executable, __file__, "--child", "--steps", str(options.steps), *cases]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        late = threading.Timer(options.limit, process.kill)
        late.start()
        for line in process.stdout:
            print(line, end="", flush=True)
            rows += [json.loads(line[7:])] if line.startswith("result ") else []
        late.cancel()
        if process.wait():
            print(f"{group} ended with {process.returncode} (-9: after {options.limit} s)", flush=True)
    print(" | ".join(COLUMNS))
    for row in rows:
        cells = [row.get(name, "") for name in COLUMNS]
        print(" | ".join(f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in cells))


if __name__ == "__main__":
    main()
