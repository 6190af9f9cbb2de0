"""Time the whole model of ``experiment=proxy_gpu`` on one GPU; the tables come last.

    python tests/gpu/run_proxy.py [override ...]

Inputs: one and two documents of random ids over the whole vocabulary, and packed documents of the corpus,
once as they come and once more. Routing is natural, as the new model's router happens to choose. Medians of
10 after 3 warm-ups.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from k3train.backend.start import end_process, seed_everything, start_backend, start_processes
from k3train.config.compose import compose
from k3train.curriculum.stages import stage_table

WARM_UPS, TIMED = 3, 10


def timed(run: Callable[[int], Any], tokens: int) -> str:
    """Median milliseconds on the device and on the host (until the last launch), and tokens per second."""
    device, host = [], []
    for i in range(WARM_UPS + TIMED):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        before = time.perf_counter()
        start.record()
        run(i)
        end.record()
        launched = time.perf_counter()
        end.synchronize()
        device.append(start.elapsed_time(end))
        host.append(1e3 * (launched - before))
    ms = statistics.median(device[WARM_UPS:])
    spread = f"{min(device[WARM_UPS:]):.1f} to {max(device[WARM_UPS:]):.1f}"
    issued = statistics.median(host[WARM_UPS:])
    return f"{ms:.1f} ms ({spread}), host {issued:.1f} ms, {1e3 * tokens / ms:,.0f} tokens/s"


def waits(run: Callable[[], Any]) -> Counter[str]:
    """Where the host waited for the device, and other warnings, by source line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        run()
        torch.cuda.set_sync_debug_mode("default")
    return Counter(f"{'/'.join(Path(w.filename).parts[-3:])}:{w.lineno}" for w in caught)


def profile(title: str, run: Callable[[], Any], rows: int = 22) -> None:
    """Print the kernels that take longest."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as recorded:
        run()
        torch.cuda.synchronize()
    kernels = [e for e in recorded.key_averages() if e.self_device_time_total > 0]
    kernels.sort(key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in kernels) / 1e3
    print(f"\n{title}: {total:.1f} ms in {sum(e.count for e in kernels)} kernels")
    for e in kernels[:rows]:
        ms = e.self_device_time_total / 1e3
        print(f"{ms:8.2f} ms {100 * ms / total:5.1f}% {e.count:5d}x  {e.key[:110]}")


def main(overrides: list[str]) -> None:
    """Build, time, profile."""
    run = compose(["experiment=proxy_gpu", *overrides])
    device = start_backend(run.device)
    start_processes(device, timeout_seconds=600)
    seed_everything(run.seed)

    from k3train.bench.case_model import random_documents
    from k3train.data.device import to_device
    from k3train.kernels.describe import describe_kernels
    from k3train.optim.build import allocate_state
    from k3train.train.progress import Progress
    from k3train.train.setup import build_stage
    from k3train.train.step import train_step, zero_gradients

    table = stage_table(run)
    progress, began = Progress(), time.perf_counter()
    setup = build_stage(run, table, table[0], progress, device)
    allocate_state(setup.optimizer)
    torch.cuda.synchronize()
    (chunk,), n = setup.chunks, table[0].stage.context_tokens
    parameters = sum(p.numel() for p in chunk.parameters())
    print(f"{parameters / 1e9:.3f} B parameters, built in {time.perf_counter() - began:.1f} s, "
          f"{torch.cuda.memory_allocated() / 2**30:.1f} GiB with optimizer state", flush=True)  # fmt: skip
    print(describe_kernels(run.model, device), flush=True)

    document, two = (to_device(random_documents(n, k, run.model.vocab_size), device=device) for k in (1, 2))
    packed = [setup.data.micro_batch(i, dp_rank=0, dp_size=1, index=0) for i in range(WARM_UPS + TIMED)]

    def forward_backward(batch: Any) -> None:
        with chunk.no_sync():
            loss = chunk(batch.tokens, batch.packing, labels=batch.labels).sum()
            loss.backward()

    began = time.perf_counter()
    forward_backward(document)
    torch.cuda.synchronize()
    print(
        f"first forward and backward, compilation included: {time.perf_counter() - began:.1f} s", flush=True
    )
    lines = [f"one document, forward + backward: {timed(lambda i: forward_backward(document), n)}"]
    lines.append(f"  peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    lines.append(f"two documents, forward + backward: {timed(lambda i: forward_backward(two), 2 * n)}")
    lines.append(f"  peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    print(*lines, sep="\n", flush=True)
    profile("one document, forward + backward", lambda: forward_backward(document), rows=32)
    print("warnings in one document:", dict(waits(lambda: forward_backward(document))), flush=True)

    zero_gradients(setup)
    losses = []

    def step(i: int) -> None:
        losses.append(train_step(setup, progress, [packed[i]], wants_stop=False).loss)

    segments = [len(batch.cu_seqlens) - 1 for batch in packed]
    title = f"packed ({min(segments)} to {max(segments)} documents)"
    lines.append(f"{title}, whole step with optimizer: {timed(step, n)}")
    # lengths that were not seen before cost cuDNN's plans, and shapes of arguments kernels of their own
    lines.append(f"the same again, nothing new to plan: {timed(step, n)}")
    lines.append(f"  peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    lines.append(f"  losses {losses[0]:.3f} to {losses[-1]:.3f}")
    profile("packed, whole step", lambda: step(0))
    print("warnings in a whole step:", dict(waits(lambda: step(1))))
    print("", *lines, sep="\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
    end_process(0)
