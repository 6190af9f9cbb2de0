"""KDA on one GPU for tests and by hand: inputs, the recurrence in float64, documents cut or in shards.

    python tests/gpu/run_kda.py sweep [HEADS TOKENS]    # every kind of chain alone, by segments
    python tests/gpu/run_kda.py kernels [HEADS TOKENS DOCUMENTS]    # time by kernel
    python tests/gpu/run_kda.py once [HEADS TOKENS]    # two passes, for a profiler or a checker around it

Whole calls are timed by ``k3train bench kda``, which has the peers too; ``test_kda_triton.py`` checks them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from k3train.bench.kda_inputs import GRADIENTS, kda_inputs
from k3train.kernels.packing import make_packing
from tests.gpu import kda_stages as stages

BOUND = -5.0
NAMES = GRADIENTS
REGIMES = ("mixed", "saturated", "alternating", "slow", "correlated")
DOCUMENTS = (0, 1, 101, 165, 166, 357, 512)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.detach().double() - b.detach().double()).norm() / (b.detach().double().norm() + 1e-300))


def make(b: int, t: int, h: int, regime: str, seed: int = 0) -> list[Tensor]:
    """q, k, v, z, beta, A_log and dt_bias of a regime: bf16 and fp32, on the GPU."""
    return kda_inputs(regime, (b, t, h, 128), device="cuda", dtype=torch.bfloat16, seed=seed)


def ours(*x: Tensor, borders: tuple[int, ...] | None = None, **options: Any) -> tuple[Tensor, Tensor | None]:
    from k3train.kernels.kda.triton_kda import triton_kda

    packing = None
    if borders is not None:
        packing = make_packing(borders, torch.ones(borders[-1], dtype=torch.bool), device="cuda")
    return triton_kda(*x, gate_lower_bound=BOUND, packing=packing, **options)  # pyright: ignore


def gradients(fn: Callable[..., Any], x: list[Tensor], do: Tensor, **options: Any) -> Any:
    """Output, final state and the gradients of x."""
    o, final = fn(*x, **options)
    return o, final, torch.autograd.grad(o, x, do)


def reference(x: list[Tensor], do: Tensor, borders: tuple[int, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Output and gradients of the token recurrence in float64."""
    y = [t.detach().double().requires_grad_() for t in x]
    parts = []
    for b in range(x[0].shape[0]):
        for a, e in pairwise(borders):
            parts.append(stages.recurrence(*(t[b, a:e] for t in y[:5]), y[5], y[6], BOUND)[0])
    o = torch.cat(parts).view(x[2].shape)
    return o, torch.autograd.grad(o, y, do.double())


@contextmanager
def cut_into(longest: int) -> Iterator[None]:
    """Cut documents into segments of so many chunks, whatever the cost."""
    import k3train.kernels.kda.triton_kda as kda

    before = kda.longest_segment
    kda.longest_segment = lambda *a: longest
    try:
        yield
    finally:
        kda.longest_segment = before


def shards(x: list[Tensor], do: Tensor, borders: tuple[int, ...], size: int) -> Any:
    """Outputs and gradients of ``size`` context-parallel shards, computed one after the other."""
    from k3train.kernels.kda.triton_kda import Ends, triton_kda

    exchange, outputs, parts = stages.InTurn(None), [], []
    for r in range(size):
        part = [y.detach().chunk(size, 1)[r] if y.ndim > 2 else y.detach() for y in x]
        part = [y.clone().requires_grad_() for y in part]
        valid = torch.ones(borders[-1], dtype=torch.bool)
        packing = make_packing(borders, valid, rank=r, size=size, device="cuda")
        ends = Ends(
            enters="first" if packing.continues_from_left else "",
            leaves="last" if packing.continues_to_right else "",
            shared=True,
        )
        o, _ = triton_kda(*part, gate_lower_bound=BOUND, packing=packing, exchange=exchange, ends=ends)  # pyright: ignore
        outputs.append(o)
        parts.append(part)
    exchange.state = None
    pieces = do.chunk(size, 1)
    grads = [torch.autograd.grad(outputs[r], parts[r], pieces[r]) for r in reversed(range(size))][::-1]
    joined = [torch.cat(g, 1) if g[0].ndim > 2 else torch.stack(g).sum(0) for g in zip(*grads, strict=True)]
    return torch.cat(outputs, 1), None, joined


def sweep(h: int = 16, t: int = 131072) -> None:
    """Every kind of chain alone, by segments of one document and value channels of a program."""
    import k3train.kernels.kda.triton_kda as kda
    from k3train.kernels.kda import segments
    from k3train.kernels.kda import triton_states as states

    q, k, v, z, beta, a, bias = (y.detach() for y in make(1, t, h, "mixed"))
    q, k, v, z, beta = (y[0] for y in (q, k, v, z, beta))
    call = kda._Call((0, t), h, kda.Ends(), None, BOUND, q.device)
    x = kda._operands((q, k, v, z, beta, a, bias), call)
    n = call.num_chunks
    o, s = torch.empty_like(v), x["dec"].new_zeros(64, h, 128, 128)
    hs, us = q.new_empty(n, h, 128, 128), q.new_empty(n, h, 64, 128)
    for block, parts in product((128, 64, 32), (1, 2, 3, 4, 5, 6, 8, 12, 16)):
        tables = [segments.tables((0, t), h, kda.Ends(), b, -(-n // parts), q.device) for b in (False, True)]
        f, b = (replace(y, blocks=dict.fromkeys(segments.SPEED, block)) for y in tables)
        row = {
            "output": lambda f=f: states.chain(x, v, f, "output", s, None, o=o),
            "states": lambda f=f: states.chain(x, v, f, "states", s, None, hs=hs, us=us),
            "back": lambda b=b: states.chain_back(x, o, b, "back", s, None, dhs=hs, dv=us),
        }
        if parts > 1:
            row["maps"] = lambda f=f: states.chain(x, v, f, "maps", None, s)
            row["back maps"] = lambda b=b: states.chain_back(x, o, b, "back maps", None, s)
            row["scan"] = lambda f=f: states._scan(f, "enter", s, s, states=s)
        row = {name: fn for name, fn in row.items() if block in segments.SPEED.get(name, ({block: 0},))[0]}
        text = " ".join(f"{name} {median(fn):.3f}" for name, fn in row.items())
        print(f"H{h} T{t} {block} channels {parts} segments {text}", flush=True)


def median(fn: Callable[[], Any], repeats: int = 9) -> float:
    """Milliseconds of single calls."""
    fn()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for a, b in pairs:
        a.record()
        fn()
        b.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in pairs)[repeats // 2]


def kernels(h: int = 96, t: int = 8192, documents: int = 1) -> None:
    """Milliseconds a kernel of one forward and backward pass, from the profiler."""
    from torch.profiler import ProfilerActivity, profile

    x = make(1, t, h, "mixed")
    borders = tuple(t * i // documents for i in range(documents + 1))
    gradients(ours, x, torch.randn_like(x[2]), borders=borders)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(5):
            gradients(ours, x, torch.randn_like(x[2]), borders=borders)
        torch.cuda.synchronize()
    for e in sorted(p.key_averages(), key=lambda e: -e.self_device_time_total)[:16]:
        print(f"{e.self_device_time_total / 5e3:8.4f} ms  {e.count / 5:4.0f}  {e.key[:60]}", flush=True)


def once(h: int = 96, t: int = 8192) -> None:
    """Two passes; a short buffer holds documents of 1, t / 3 - 1 and the rest, cut into single chunks."""
    x = make(1, t, h, "mixed")
    for _ in range(2):
        if t > 1000:
            gradients(ours, x, torch.randn_like(x[2]))
            continue
        with cut_into(1):
            gradients(ours, x, torch.randn_like(x[2]), borders=(0, 1, t // 3, t))
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    command = {"sweep": sweep, "kernels": kernels, "once": once}[sys.argv[1]]
    command(*(int(n) for n in sys.argv[2:]))
