"""Training steps of ``experiment=proxy_gpu`` by length and settings: time, peak memory; the table comes last.

    python tests/gpu/run_long.py [--steps N] [--limit SECONDS] CASE ...

A case is ``BATCH override ...`` as one argument; cases joined by ``;`` share a process, which saves a start.
A batch is one document of ``TOKENS``, ``DOCUMENTSxTOKENS``, or ``DOCUMENTS=TOKENS``: equal documents, whose
loss and gradient norm should be those of one alone, which is printed too. Batches joined by ``+`` train one
model after another. Documents are of random ids over the whole vocabulary. Each batch compiles on one
document, trains one step, and is timed on N more (default 5), or as many as it says itself: ``BATCH*N``;
after ``*0`` the only step is timed. What the host keeps is allocated before. An estimate is that of
``k3train show``. Memory of the host is what the machine has less during the batch; update is the time of the
optimizer in it.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

GIB, LONG = 2**30, 65536
COLUMNS = (
    "case",
    "estimate",
    "before",
    "peak",
    "reserved",
    "host",
    "ms",
    "update",
    "tokens/s",
    "loss",
    "norm",
)


@dataclass
class Batch:
    """What one micro-batch is made of."""

    documents: int
    tokens: int
    """Of one document."""
    equal: bool
    """Whether all documents are the same."""
    steps: int
    """Timed ones after the first; with none the first is timed."""

    @property
    def alone(self) -> int:
        """Tokens of the document on which kernels are compiled."""
        return min(self.tokens, LONG)

    @property
    def heads(self) -> int:
        """Heads that fully recomputed attention works on at a time, at most."""
        from k3train.plan.recompute import HEAD_TOKENS

        return max(1, HEAD_TOKENS // (self.documents * self.tokens))

    def make(self, vocabulary: int) -> Any:
        """The micro-batch."""
        from k3train.bench.case_model import random_documents

        if not self.equal:
            return random_documents(self.tokens, self.documents, vocabulary)
        one, n = random_documents(self.tokens, 1, vocabulary), self.documents
        repeated = {
            name: np.tile(getattr(one, name), n) for name in ("tokens", "labels", "labels_mtp", "valid")
        }
        borders = np.arange(0, n * self.tokens + 1, self.tokens, dtype=np.int32)
        return replace(one, cu_seqlens=borders, **repeated)


def batch_of(word: str, steps: int) -> Batch:
    """``word`` as the command line has it."""
    size, _, own = word.partition("*")
    sign = next((each for each in "x=" if each in size), "")
    documents, tokens = size.split(sign) if sign else (1, size)
    return Batch(int(documents), int(tokens), sign == "=", int(own or steps))


def available() -> int:
    """Bytes of the host's memory that programs may take."""
    line = next(x for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024


def child(cases: list[str], steps: int) -> None:
    """Run cases in this process; a line of JSON for each batch."""
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
        results: list[dict[str, Any]] = []
        setups: list[Any] = []

        def report(name: str, results: list[dict[str, Any]] = results) -> dict[str, Any]:
            results.append({"case": name})
            return results[-1]

        try:
            measure(case, steps, device, report, setups)
        except torch.cuda.OutOfMemoryError as error:
            result = results[-1] if results else report(case)
            result["loss"] = f"out of memory: {str(error).split('.')[1].strip()}"
            finish(result)
        for setup in setups:
            close_stage(setup)
    end_process(0)


def measure(case: str, steps: int, device: Any, report: Any, setups: list[Any]) -> None:
    """Build a model and train it on each batch of ``case``."""
    from k3train.config.compose import compose
    from k3train.curriculum.stages import stage_table
    from k3train.optim.build import allocate_state
    from k3train.train.progress import Progress
    from k3train.train.setup import build_stage, moments

    words, *overrides = case.split()
    run = compose(["experiment=proxy_gpu", "guards.rerun=false", *overrides])
    table, progress = stage_table(run), Progress()
    free, start = available(), time.perf_counter()
    setups.append(setup := build_stage(run, table, table[0], progress, device))
    allocate_state(setup.optimizer)
    for name, state in moments(setup.optimizer):
        if name != "master" and not state.is_cuda:
            state.zero_()  # the host gives memory when it is first written
    print(f"{case}: built in {time.perf_counter() - start:.1f} s", flush=True)
    for word in words.split("+"):
        train_on(batch_of(word, steps), setup, progress, free, report(f"{word} {' '.join(overrides)}"))


def train_on(batch: Batch, setup: Any, progress: Any, free: int, result: dict[str, Any]) -> None:
    """Compile on one document, then train on all."""
    import torch

    from k3train.optim.memory import stage_memory
    from k3train.train.step import train_step

    case, plan, run = result["case"], setup.plan, setup.run
    stage = replace(plan.stage, context_tokens=batch.documents * batch.tokens)
    result["estimate"] = stage_memory(run, replace(plan, stage=stage)).total / GIB
    result["before"] = torch.cuda.memory_allocated() / GIB
    start = time.perf_counter()
    print(
        f"{case}: {one_document(batch, setup)}; compiled in {time.perf_counter() - start:.1f} s", flush=True
    )
    start = time.perf_counter()
    allocate_on_host(batch, run)
    print(f"{case}: {time.perf_counter() - start:.1f} s for memory of the host", flush=True)
    torch.cuda.reset_peak_memory_stats()
    micro = batch.make(run.model.vocab_size)
    times, updates, steps = [], [], []
    for i in range(1 + batch.steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        with timed_update(updates):
            steps.append(train_step(setup, progress, [micro], wants_stop=False))
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
        print(f"{case}: step {i + 1}, {times[-1]:.0f} ms, {updates[-1]:.0f} of them the optimizer, loss "
              f"{steps[-1].loss:.6f}, norm {steps[-1].grad_norm:.5f}, "
              f"peak {torch.cuda.max_memory_allocated() / GIB:.1f} GiB", flush=True)  # fmt: skip
        result["host"] = max(result.get("host", 0.0), (free - available()) / GIB)
    timed = times[1:] or times
    result["ms"] = f"{statistics.median(timed):.1f} ({min(timed):.1f} to {max(timed):.1f})"
    result["update"] = statistics.median(updates[1:] or updates)
    result["tokens/s"] = f"{1e3 * batch.documents * batch.tokens / statistics.median(timed):,.0f}"
    result["loss"] = f"{steps[0].loss:.5f} to {steps[-1].loss:.5f}"
    result["norm"] = f"{steps[0].grad_norm:.4f}"
    finish(result)


def finish(result: dict[str, Any]) -> None:
    """Print what is known."""
    import torch

    result["peak"] = torch.cuda.max_memory_allocated() / GIB
    result["reserved"] = torch.cuda.max_memory_reserved() / GIB
    print("result", json.dumps(result), flush=True)


def one_document(batch: Batch, setup: Any) -> str:
    """A pass over one document, without effect, in pieces of as many heads as the whole batch will have."""
    import torch

    from k3train.optim.build import gradient_norm
    from k3train.plan import recompute
    from k3train.train.schedule import run_micro_batches, zero_gradients

    usual = recompute.HEAD_TOKENS
    recompute.HEAD_TOKENS = batch.heads * batch.alone
    alone = replace(batch, documents=1, tokens=batch.alone)
    loss, count, *_ = run_micro_batches(
        setup, [alone.make(setup.run.model.vocab_size)], backward=True
    ).tolist()
    norm = gradient_norm(setup.optimizer)
    recompute.HEAD_TOKENS = usual
    setup.routers.discard()
    zero_gradients(setup)
    if batch.documents > 1:
        several_documents(batch, setup.run.model, setup.device)
    torch.cuda.synchronize()
    return f"{batch.alone} tokens alone, loss {loss / count:.6f}, norm {norm / count:.5f}"


def several_documents(batch: Batch, model: Any, device: Any) -> None:
    """A pass of KDA alone: its kernels differ with the number of documents."""
    import torch

    from k3train.data.device import to_device
    from k3train.kernels.kda.choose import kda

    packing, (h, d) = to_device(batch.make(16), device=device).packing, (batch.heads, model.kda.head_dim)
    h, n = min(h, model.num_heads), packing.stop
    inputs = [torch.randn(1, n, h, d, dtype=torch.bfloat16, device=device).requires_grad_() for _ in range(4)]
    beta, rates = inputs[0].detach()[..., 0], torch.zeros(h * (d + 1), device=device)
    bound = model.kda.gate_lower_bound
    o = kda(*inputs, beta, rates[:h], rates[h:], gate_lower_bound=bound, packing=packing, keep="operands")[0]
    o.sum().backward()


def allocate_on_host(batch: Batch, run: Any) -> None:
    """Pinned memory for one input of every layer, which torch keeps for the step; none is left of before."""
    import torch

    torch._C._host_emptyCache()
    if run.parallel.recompute_offload:
        size = batch.documents * batch.tokens * run.model.hidden_size
        kept = [torch.empty(size, dtype=torch.bfloat16, pin_memory=True) for _ in range(run.model.num_layers)]
        del kept


@contextmanager
def timed_update(updates: list[float]) -> Iterator[None]:
    """Append the optimizer's milliseconds in one step."""
    import torch

    from k3train.train import step

    update = step.apply_gradients

    def timed(*args: Any, **settings: Any) -> None:
        torch.cuda.synchronize()
        start = time.perf_counter()
        update(*args, **settings)
        torch.cuda.synchronize()
        updates.append(1e3 * (time.perf_counter() - start))

    step.apply_gradients, before = timed, len(updates)
    try:
        yield
    finally:
        step.apply_gradients = update
        updates += [math.nan] * (len(updates) == before)  # a step that was skipped


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
