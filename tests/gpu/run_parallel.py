"""Two GPUs against one: losses of 20 steps in five layouts, and a sequence of 262,144 tokens over both.

    torchrun --nproc-per-node 2 -m tests.gpu.run_parallel

Rank 0 first trains on one GPU, in a process of its own, twice: as given, and with the micro-batches in
reverse order, which changes nothing but rounding. Every layout starts from the same weights and meets the
same new tokens in every step. What does not fit into ``--seconds`` is left out, what fails is named, and the
table comes last in any case. With ``--small`` everything is tiny and runs on the CPU too.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from k3train.backend.start import end_process, seed_everything, start_backend, start_processes
from k3train.config.compose import compose
from k3train.config.schema import Device, Model, Optim, Parallel, Recompute

MICROS = 4
SHAPE = {
    "num_layers": "6",
    "mla_layers": "[3,5]",
    "hidden_size": "1024",
    "num_heads": "8",
    "vocab_size": "8192",
    "dense_ffn_size": "2048",
    "attn_res.block_layers": "2",
    "moe.num_experts": "16",
    "moe.top_k": "4",
    "moe.latent_size": "512",
    "moe.expert_ffn_size": "512",
}
SMALL = {
    "hidden_size": "64",
    "num_heads": "4",
    "vocab_size": "512",
    "dense_ffn_size": "64",
    "kda.head_dim": "16",
    "moe.latent_size": "32",
}
LAYOUTS = {
    "ep2": Parallel(ep=2),
    "tp2": Parallel(tp=2),
    "pp2 (vpp2)": Parallel(pp=2, vp=2),
    "cp2": Parallel(cp=2),
    "dp2": Parallel(),
}
LONG = "long sequence"


def settings(small: bool) -> tuple[Model, int, int, int]:
    """Model, tokens of one micro-batch, tokens of the long sequence, steps."""
    sizes = SHAPE | SMALL if small else SHAPE
    model = compose(["model=k3_proxy", *(f"model.{key}={value}" for key, value in sizes.items())]).model
    return (model, 64, 256, 2) if small else (model, 4096, 262_144, 20)


def train(
    model: Model,
    parallel: Parallel,
    micros: list[torch.Tensor],
    steps: int,
    device: torch.device,
    weights: Any,
) -> dict[str, Any]:
    """Mean loss of each step, median seconds of the later half, and one rank's initial weights (else None).

    ``micros``: those of the first step, then those of the second, and so on.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    from k3train.model.build import build_model
    from k3train.model.config import make_config
    from k3train.model.payload import schedule_config
    from k3train.optim.build import build_optimizer
    from k3train.parallel.groups import start_groups, stop_groups
    from k3train.parallel.layout import make_layout
    from k3train.router.update import update_biases
    from tests import sharded
    from tests.optimizer_step import optimizer_step

    world = dist.get_world_size()
    layout = make_layout(model, parallel, world)
    groups = start_groups(layout, seed=7)
    config = make_config(model, parallel, layout)
    modules = build_model(model, config, layout, groups, device)
    if weights is not None:
        sharded.load(modules, groups, {key: value.to(device) for key, value in weights.items()})
    held = None
    if world == 1:
        held = {key: part.cpu().clone() for key, _, _, part in sharded.shards(modules, groups)}
    wide = schedule_config(config, layout)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    chunks = [
        DistributedDataParallel(wide, ddp, module, disable_bucketing=i > 0, pg_collection=groups.pg)
        for i, module in enumerate(modules)
    ]
    optimizer = build_optimizer(Optim(learning_rate=3e-4), chunks, groups)
    wide.finalize_model_grads_func, wide.grad_scale_func = finalize_model_grads, optimizer.scale_loss
    losses, seconds, each = [], [], len(micros) // steps
    for step in range(steps):
        now = micros[step * each : (step + 1) * each]
        began = time.perf_counter()
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses.append(run_step(chunks, groups, now[groups.dp_rank :: layout.dp], device))
        optimizer_step(optimizer)
        update_biases(chunks, groups.tokens)
        seconds.append(time.perf_counter() - began)
    stop_groups()
    return {"losses": losses, "seconds": statistics.median(seconds[steps // 2 :]), "weights": held}


def run_step(chunks: list[Any], groups: Any, micros: list[torch.Tensor], device: torch.device) -> float:
    """Forward and backward of one step; the mean loss over all ranks' tokens."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from k3train.kernels.packing import make_packing

    layout = groups.layout

    def forward(iterator: Any, chunk: Any) -> tuple[torch.Tensor, Any]:
        tokens = next(iterator)
        n = tokens.numel()
        valid = torch.ones(n, dtype=torch.bool)
        borders = [0, n // 3, n // 2 + 1, n]  # three documents; the second crosses the shards' border
        place = make_packing(borders, valid, rank=groups.cp_rank, size=layout.cp, device=device)
        labels = tokens.roll(-1)
        labels[torch.tensor(borders[1:]) - 1] = -100
        part = slice(place.start, place.stop)
        out = chunk(tokens[None, part].to(device), place, labels=labels[None, part].to(device))
        count = (labels[part] != -100).sum().int().to(device)

        def sums(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            total = losses.sum()
            return total, count, torch.stack([total.detach().double(), count.double()])

        return out, sums

    run = get_forward_backward_func(pp_size=layout.pp, vp_size=layout.vp if layout.vp > 1 else None)
    parts = run(
        forward_step_func=forward,
        data_iterator=[iter(micros) for _ in chunks] if len(chunks) > 1 else iter(micros),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(micros),
        seq_length=micros[0].numel(),
        micro_batch_size=1,
        forward_only=False,
    )
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for each in parts:
        total += each
    dist.all_reduce(total)
    return float(total[0] / total[1])


def tokens_of(model: Model, n: int, count: int) -> list[torch.Tensor]:
    """Micro-batches of random tokens, the same everywhere, in which a quarter repeats four times."""
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(model.vocab_size, (n // 4,), generator=generator).repeat(4)[:n] for _ in range(count)
    ]


def one_gpu(path: Path, small: bool) -> None:
    """Train on one GPU and write losses, their rounding noise and the first weights to ``path``."""
    device = start_backend(Device.auto)
    start_processes(device, timeout_seconds=120)
    seed_everything(1)
    model, n, _, steps = settings(small)
    micros = tokens_of(model, n, MICROS * steps)
    first = train(model, Parallel(), micros, steps, device, None)
    turned = [each for i in range(0, len(micros), MICROS) for each in micros[i : i + MICROS][::-1]]
    again = train(model, Parallel(), turned, steps, device, first["weights"])
    torch.save({**first, "again": again["losses"]}, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)
    end_process(0)


def compare(small: bool, seconds: float) -> None:
    """Train every layout on two ranks and print the table on rank 0."""
    deadline = time.monotonic() + seconds
    rank = int(os.environ["RANK"])
    path = Path(tempfile.gettempdir(), f"one_gpu_{os.environ['MASTER_PORT']}.pt")
    if rank == 0:
        path.unlink(missing_ok=True)
        # A store of its own: what one process leaves in torchrun's would be read as the two ranks' own.
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": free_port()}
        alone["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        command = [sys.executable, "-m", "tests.gpu.run_parallel", "--one", str(path)]
        subprocess.run(
            command + ["--small"] * small, env={**os.environ, **alone}, check=True, timeout=seconds / 2
        )
    device = start_backend(Device.auto)
    start_processes(device, timeout_seconds=round(seconds / 2))  # rank 1 waits here
    seed_everything(1)
    model, n, long, steps = settings(small)
    one = torch.load(path, weights_only=False)
    held = one["weights"]
    rows = [
        row("one GPU", one, one),
        row("one GPU, micro-batches reversed", {**one, "losses": one["again"]}, one),
    ]
    failed = False
    try:
        for name, parallel in {**LAYOUTS, LONG: Parallel(cp=2, recompute=Recompute.full)}.items():
            if not agreed(time.monotonic() < deadline, device):
                rows.append(f"{name:34} left out: {seconds:.0f} s are over")
            elif name == LONG:
                rows.append(
                    long_row(train(model, parallel, tokens_of(model, long, 3), 3, device, held), long)
                )
            else:
                got = train(model, parallel, tokens_of(model, n, MICROS * steps), steps, device, held)
                rows.append(row(name, got, one))
            if rank == 0:
                print(rows[-1], flush=True)
    except Exception:
        # The other rank waits in some collective: nothing more can be measured, but what was is printed.
        failed = True
        rows.append(f"{name:34} failed on rank {rank}")
        traceback.print_exc()
    if rank == 0 or failed:
        print(f"\n{'layout':34} first loss  last loss  largest relative difference  s/step")
        print("\n".join(rows))
        sys.stdout.flush()
    end_process(int(failed))


def free_port() -> str:
    """A port nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def agreed(mine: bool, device: torch.device) -> bool:
    """Whether both ranks say so."""
    both = torch.tensor(float(mine), device=device)
    dist.all_reduce(both, op=dist.ReduceOp.MIN)
    return bool(both)


def long_row(got: dict[str, Any], tokens: int) -> str:
    """The line of the long sequence."""
    memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    losses = " ".join(f"{loss:.4f}" for loss in got["losses"])
    name = f"cp2, {tokens} tokens, full recompute"
    return f"{name}: losses {losses}, {got['seconds']:.2f} s/step, {memory:.1f} GiB"


def row(name: str, got: dict[str, Any], one: dict[str, Any]) -> str:
    """One line of the table."""
    off = max(abs(a / b - 1) for a, b in zip(got["losses"], one["losses"], strict=True))
    return f"{name:34} {got['losses'][0]:10.4f} {got['losses'][-1]:10.4f} {off:28.1e} {got['seconds']:7.3f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--one", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seconds", type=float, default=480)
    options = parser.parse_args()
    if options.one is not None:
        one_gpu(options.one, options.small)
    compare(options.small, options.seconds)
