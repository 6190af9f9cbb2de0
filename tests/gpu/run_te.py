"""What Transformer Engine gains on one GPU; a table comes last.

    python tests/gpu/run_te.py kernels            # products, RMSNorm and AdamW
    python tests/gpu/run_te.py model              # experiment=proxy_gpu in bf16 and in FP8
    python tests/gpu/run_te.py loss 30            # steps of a small model in bf16 and in FP8
    python tests/gpu/run_te.py save FOLDER        # a checkpoint of that model in bf16 ...
    python tests/gpu/run_te.py load FOLDER        # ... goes on in FP8, and the other way round

Products, norms: medians over 150 ms, cold L2. Whole model: medians of 10 after 3 warm-ups; one document of
random ids, or packed documents of the corpus; natural routing, as the new model's router happens to choose.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor

from k3train.backend.start import end_process, seed_everything, start_backend, start_processes
from k3train.config.compose import compose
from k3train.config.schema import Fp8
from k3train.curriculum.stages import stage_table
from tests.gpu.run_proxy import profile, timed

SMALL = (
    "model.hidden_size=512 model.num_heads=4 model.dense_ffn_size=1024 model.kda.head_dim=128 "
    "model.kda.decay_rank=128 model.mla.q_lora_rank=256 model.mla.kv_lora_rank=128 model.mla.qk_head_dim=128 "
    "model.mla.qk_shared_head_dim=64 model.mla.v_head_dim=128 model.moe.latent_size=256 "
    "model.moe.expert_ffn_size=128 model.moe.shared_ffn_size=256 model.num_layers=8"
).split()
"""Of experiment=debug_gpu: wide enough for every recipe."""
DEVICE = start_backend()
RECIPES = (Fp8.none, Fp8.tensorwise, Fp8.blockwise)


def bench(function: Callable[[], Any]) -> float:
    """Median milliseconds."""
    from triton.testing import do_bench

    return do_bench(function, warmup=50, rep=150, return_mode="median")


def products() -> list[str]:
    """Forward and backward of single projections of n = 8,192 tokens, weight gradients into fp32 buffers."""
    shapes = {
        "KDA q,k,v,g of the proxy": (2048, 4 * [2048]),
        "dense gate,up of the proxy": (2048, 2 * [8192]),
        "latent up of the proxy": (1024, [2048]),
        "KDA q,k,v,g of K3": (7168, 4 * [12288]),
        "dense gate,up of K3": (7168, 2 * [33792]),
    }
    lines = ["projection, n = 8192: ms forward + backward"]
    return lines + [f"  {name}: {product(k, outputs)}" for name, (k, outputs) in shapes.items()]


def product(k: int, outputs: list[int]) -> str:
    """One projection of width ``k`` in each recipe."""
    from k3train.kernels.linear import linears

    x = torch.randn(8192, 1, k, device="cuda").bfloat16().requires_grad_()
    whole = torch.randn(sum(outputs), k, device="cuda").bfloat16()
    sums = torch.zeros(sum(outputs), k, device="cuda")
    weights: list[Any] = [part.detach().requires_grad_() for part in whole.split(outputs)]
    for weight, part in zip(weights, sums.split(outputs), strict=True):
        weight.main_grad = part
    back = torch.randn(8192, 1, sum(outputs), device="cuda").bfloat16().split(outputs, -1)

    def both(recipe: Fp8) -> None:
        torch.autograd.backward(linears(x, weights, recipe), back)
        x.grad = None

    found = []
    for recipe in RECIPES:
        forward, whole_pass = bench(partial(linears, x, weights, recipe)), bench(partial(both, recipe))
        found.append(f"{recipe.value} {forward:.3f} + {whole_pass - forward:.3f} = {whole_pass:.3f}")
    return ", ".join(found)


def norms() -> list[str]:
    """RMSNorm of bf16 rows; the weight is fp32 here and bf16 there."""
    from transformer_engine.pytorch import RMSNorm

    from k3train.kernels.rms_norm import rms_norm

    lines = ["RMSNorm bf16: forward, forward + backward ms"]
    for n, c in ((8192, 2048), (16384, 2048), (8192, 7168)):
        x = torch.randn(n, c, device="cuda").bfloat16().requires_grad_()
        back, weight = torch.randn_like(x), torch.ones(c, device="cuda", requires_grad=True)
        ours = partial(rms_norm, weight=weight, eps=1e-5)
        theirs = RMSNorm(c, eps=1e-5, params_dtype=torch.bfloat16, device="cuda")
        a, b = (
            f"{bench(partial(f, x)):.3f}, {bench(partial(passes, f, x, back)):.3f}" for f in (ours, theirs)
        )
        lines.append(f"  {n} x {c}: k3train {a}; TE {b}")
    return lines


def passes(function: Callable[[Tensor], Tensor], x: Tensor, back: Tensor) -> None:
    """Forward and backward."""
    function(x).backward(back)


def adams(elements: int = 4_400_000_000, pieces: int = 64) -> list[str]:
    """One step over fp32 master weights, gradients and moments: 28 bytes an element."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    from k3train.optim.adam import GroupStepAdam

    size = elements // pieces
    params = [torch.nn.Parameter(torch.zeros(size, device="cuda")) for _ in range(pieces)]
    for p in params:
        p.grad = torch.full_like(p, 1e-3)
    lines = [f"AdamW, {elements / 1e9:.1f} B elements in {pieces} tensors, ms a step"]
    for kind in (GroupStepAdam, FusedAdam):
        optimizer: Any = kind(params, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
        optimizer.step()
        times = []
        for _ in range(7):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            optimizer.step()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        ms = sorted(times)[3]
        lines.append(f"  {kind.__module__}.{kind.__name__}: {ms:.1f}, {28 * elements / ms / 1e9:.2f} TB/s")
        del optimizer
        torch.cuda.empty_cache()
    return lines


def stage(overrides: list[str], recipe: Fp8) -> Any:
    """The first stage of a run, new."""
    from k3train.optim.build import allocate_state
    from k3train.train.progress import Progress
    from k3train.train.setup import build_stage

    run = compose([*overrides, f"model.fp8={recipe.value}"])
    seed_everything(run.seed)
    table, progress = stage_table(run), Progress()
    setup = build_stage(run, table, table[0], progress, DEVICE)
    allocate_state(setup.optimizer)
    return setup, progress


def whole_model(recipe: Fp8, overrides: list[str]) -> list[str]:
    """Forward and backward of one document, and whole steps with the optimizer."""
    from k3train.bench.case_model import random_documents
    from k3train.data.device import to_device
    from k3train.train.setup import close_stage
    from k3train.train.step import train_step, zero_gradients

    setup, progress = stage(["experiment=proxy_gpu", *overrides], recipe)
    (chunk,), n = setup.chunks, setup.plan.stage.context_tokens
    adam = type(setup.optimizer.chained_optimizers[0].optimizer).__module__
    batch = to_device(random_documents(n, 1, setup.run.model.vocab_size), device=DEVICE)

    def both(i: int) -> None:
        with chunk.no_sync():
            chunk(batch.tokens, batch.packing, labels=batch.labels).sum().backward()

    torch.cuda.reset_peak_memory_stats()
    lines = [f"{recipe.value}, one document, forward + backward: {timed(both, n)}"]
    lines.append(f"  peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    profile(f"{recipe.value}, one document, forward + backward", lambda: both(0), rows=16)
    zero_gradients(setup)
    packed = [setup.data.micro_batch(i, dp_rank=0, dp_size=1, index=0) for i in range(13)]
    losses = []

    def step(i: int) -> None:
        losses.append(train_step(setup, progress, [packed[i]], wants_stop=False).loss)

    lines.append(f"{recipe.value}, packed, whole step with {adam}: {timed(step, n)}")
    lines.append(f"  losses {losses[0]:.4f} to {losses[-1]:.4f}")
    print(*lines, sep="\n", flush=True)
    close_stage(setup)
    return lines


def trained(setup: Any, progress: Any, steps: int) -> list[float]:
    """Losses of the next steps."""
    from k3train.train.step import train_step

    return [train_step(setup, progress, next(setup.batches), wants_stop=False).loss for _ in range(steps)]


def losses(steps: int) -> list[str]:
    """The same steps in each recipe."""
    from k3train.train.setup import close_stage

    lines = [f"losses of {steps} steps, small model, by recipe"]
    for recipe in RECIPES:
        setup, progress = stage(["experiment=debug_gpu", *SMALL], recipe)
        found = trained(setup, progress, steps)
        lines.append(f"  {recipe.value}: " + " ".join(f"{loss:.4f}" for loss in found))
        close_stage(setup)
    return lines


def exchange(action: str, folder: Path) -> list[str]:
    """Save after ten steps; or load what bf16 saved into FP8 and back, and say the losses that follow."""
    from k3train.checkpoint.folder import newest_good
    from k3train.checkpoint.load import load_checkpoint
    from k3train.checkpoint.save import Save, save_checkpoint
    from k3train.train.setup import close_stage

    lines: list[str] = []

    def save(setup: Any, where: Path) -> None:
        state = {"step": 10}
        parts = {"chunks": setup.chunks, "optimizer": setup.optimizer, "groups": setup.groups}
        save_checkpoint(Save(directory=where, train_state=state, keep=2, **parts))

    def held(setup: Any) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in setup.chunks[0].module.named_parameters()}

    setup, progress = stage(["experiment=debug_gpu", *SMALL], Fp8.none)
    if action == "save":
        lines.append(f"bf16: {trained(setup, progress, 10)[-1]:.4f}")
        save(setup, folder)
    else:
        previous: dict[str, Tensor] = {}
        where = folder
        for recipe in (Fp8.tensorwise, Fp8.none, Fp8.blockwise, Fp8.none):
            close_stage(setup)
            setup, progress = stage(["experiment=debug_gpu", *SMALL], recipe)
            parts = {"chunks": setup.chunks, "optimizer": setup.optimizer, "groups": setup.groups}
            load_checkpoint(newest_good(where), **parts, verified=True)  # type: ignore[arg-type]
            assert all(torch.equal(p, previous[name]) for name, p in held(setup).items() if previous)
            lines.append(
                f"{recipe.value} from there: " + " ".join(f"{x:.4f}" for x in trained(setup, progress, 3))
            )
            previous, where = held(setup), folder.with_name(f"{where.name}-{recipe.value}")
            save(setup, where)
    close_stage(setup)
    return lines


def main(action: str, overrides: list[str]) -> None:
    """Run one of the parts."""
    start_processes(DEVICE, timeout_seconds=600)
    began = time.perf_counter()
    match action:
        case "kernels":
            lines = products() + norms() + adams()
        case "model":
            lines = []
            for recipe in RECIPES:
                lines += whole_model(recipe, overrides)
                gc.collect()
                torch.cuda.empty_cache()
        case "loss":
            lines = losses(int(overrides[0]) if overrides else 30)
        case _:
            lines = exchange(action, Path(overrides[0]))
    try:
        engine = version("transformer_engine")
    except PackageNotFoundError:
        engine = "none"
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
    print(f"\n{name}, torch {torch.__version__}, Transformer Engine {engine}")
    print(*lines, f"took {time.perf_counter() - began:.0f} s", sep="\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
    end_process(0)
