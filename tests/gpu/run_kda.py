"""Build, check and time the Hopper KDA kernels on one GPU; the tables come last.

    python tests/gpu/run_kda.py [--budget SECONDS] [--sections stages,check,time,fla] [--out FOLDER]

Every section runs in a process of its own with a time limit, so that a hanging kernel costs only its section.
``fla`` needs fla-core on the path and is timed in the same run. Errors are norms relative to float64.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise, product
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tests" / "gpu"))

import kda_stages as stages  # noqa: E402
import torch  # noqa: E402

BOUND = -5.0
NAMES = ("dq", "dk", "dv", "dz", "dbeta", "dA_log", "ddt_bias")
REGIMES = ("mixed", "saturated", "alternating", "slow", "correlated")
DOCUMENTS = (0, 1, 101, 165, 166, 357, 512)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach().double() - b.detach().double()).norm() / (b.detach().double().norm() + 1e-300))


def make(b: int, t: int, h: int, regime: str, seed: int = 0, d: int = 128) -> list[torch.Tensor]:
    """q, k, v, z, beta bf16 [b, t, h(, d)], A_log [h], dt_bias [h * d] fp32, all requiring gradients."""
    gen = torch.Generator(device="cuda").manual_seed(seed)

    def n(*s: int) -> torch.Tensor:
        return torch.randn(*s, device="cuda", generator=gen)

    q, k, v, z = (n(b, t, h, d) for _ in range(4))
    if regime == "mixed":
        z = z * 3
    if regime == "saturated":
        z = z * 0.3 + 6
    if regime == "slow":
        z = z * 0.5 - 5
    if regime == "alternating":
        z = z * 0.3 + torch.where(torch.arange(d, device="cuda") % 2 == 0, 7.0, -7.0)
    if regime in ("alternating", "slow", "correlated"):
        k = k + 2 * k[:, :1]
    bf = [x.to(torch.bfloat16) for x in (q, k, v, z, n(b, t, h))]
    a, bias = torch.rand(h, device="cuda", generator=gen) * 0.5, n(h * d) * 0.1
    return [x.requires_grad_() for x in (*bf, a, bias)]


def ours(*x, borders=None, **kw):
    from k3train.kernels.kda.triton_kda import triton_kda
    from k3train.kernels.packing import make_packing

    packing = None
    if borders is not None:
        packing = make_packing(borders, torch.ones(borders[-1], dtype=torch.bool), device="cuda")
    return triton_kda(*x, gate_lower_bound=BOUND, packing=packing, **kw)


def fla(*x, borders=None):
    from fla.ops.kda import chunk_kda

    q, k, v, z, beta, a, bias = x
    cu = None if borders is None else torch.tensor(borders, device="cuda", dtype=torch.long)
    return chunk_kda(
        q=q, k=k, v=v, g=z, beta=beta, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, safe_gate=True,
        lower_bound=BOUND, A_log=a, dt_bias=bias, cu_seqlens=cu,
    )[0], None  # fmt: skip


def section_stages(out: dict) -> None:
    """Every kernel's output for one document of 200 tokens against the same algebra in float64."""
    import k3train.kernels.kda.triton_kda as T

    t, h, d = 200, 2, 128
    for regime in REGIMES:
        x = [y.detach() for y in make(1, t, h, regime)]
        do = torch.randn(t, h, d, device="cuda").to(torch.bfloat16)
        s0, ds = torch.randn(2, 1, h, d, d, device="cuda")
        q, k, v, z, beta = (y[0].contiguous() for y in x[:5])
        want = stages.run(
            *(y.double() for y in (q, k, v, z, beta, *x[5:], do)),
            BOUND,
            s0[0].double(),
            ds[0].double(),
            stages.bf16,
        )
        call = T._Call((0, t), h, T.Ends(enters="all"), None, BOUND, q.device)
        got = T._operands(q, k, z, beta, x[5], x[6], call)
        row = {}
        for name in ("kh", "kt", "qh", "aqk", "tb", "dec"):
            row[name] = relative(got[name].transpose(0, 1), want[name])
        o, final = T._Kda.apply(q, k, v, z, beta, x[5], x[6], s0, call, True)
        row["o"], row["final"] = relative(o, want["o"]), relative(final[0], want["final"])
        keep = {}
        inner = T._input_gradients

        def spy(*a, keep=keep, inner=inner):
            keep.update(us=a[3], dv=a[4], hs=a[5], dhs=a[6])
            return inner(*a)

        T._input_gradients = spy
        inputs = (q, k, v, z, beta, x[5], x[6])
        g = T._backward(inputs, s0, o, (s0, None, None), None, do, ds.contiguous(), call)
        T._input_gradients = inner
        for name, key in (("U", "us"), ("hs", "hs"), ("dhs", "dhs")):
            row[name] = relative(keep[key].transpose(0, 1), want[name])
        for name, y in zip((*NAMES, "dinitial"), g, strict=True):
            row[name] = relative(y[0] if name == "dinitial" else y, want[name])
        out.setdefault("stages", {})[regime] = row
        print("stages", regime, " ".join(f"{n} {e:.1e}" for n, e in row.items()), flush=True)


def gradients(fn, x, do, **kw):
    o, final = fn(*x, **kw)
    return o, final, torch.autograd.grad(o, x, do)


def reference(x, do, borders):
    y = [t.detach().double().requires_grad_() for t in x]
    parts = []
    for b in range(x[0].shape[0]):
        for a, e in pairwise(borders):
            parts.append(stages.recurrence(*(t[b, a:e] for t in y[:5]), y[5], y[6], BOUND)[0])
    o = torch.cat(parts).view(x[2].shape)
    return o, torch.autograd.grad(o, y, do.double())


def section_check(out: dict, h: int, who: str = "ours") -> None:
    """Output and all gradients against the token recurrence in float64; two runs bitwise equal."""
    fn = {"ours": ours, "fla": fla}[who]
    cases = [(1, 512, r, None) for r in REGIMES] + [
        (1, 512, "mixed", DOCUMENTS),
        (1, 512, "slow", DOCUMENTS),
        (1, 77, "mixed", None),
    ]
    cases.append((2, 130, "mixed", None))
    for b, t, regime, borders in cases:
        if who == "fla" and borders is None and t != 512:
            continue
        x = make(b, t, h, regime, seed=t)
        do = torch.randn(b, t, h, 128, device="cuda").to(torch.bfloat16)
        torch.full((1 << 28,), float("nan"), device="cuda")  # the workspace comes from this poisoned block
        o, _, g = gradients(fn, x, do, borders=borders)
        o2, _, g2 = gradients(fn, x, do, borders=borders)
        same = torch.equal(o, o2) and all(torch.equal(p, r) for p, r in zip(g, g2, strict=True))
        ro, rg = reference(x, do, borders or (0, t))
        row = {
            "o": relative(o, ro),
            **{n: relative(p, r) for n, p, r in zip(NAMES, g, rg, strict=True)},
            "repeat": same,
        }
        key = f"{who} h{h} b{b} t{t} {regime}{' documents' if borders else ''}"
        out.setdefault("check", {})[key] = row
        print(
            key,
            " ".join(f"{n} {e:.1e}" for n, e in row.items() if n != "repeat"),
            "bitwise" if same else "NOT REPEATABLE",
            flush=True,
        )


@contextmanager
def cut_into(longest: int) -> Iterator[None]:
    """Cut documents into segments of so many chunks, whatever the cost."""
    import k3train.kernels.kda.triton_kda as T

    before = T.longest_segment
    T.longest_segment = lambda *a: longest
    try:
        yield
    finally:
        T.longest_segment = before


def shards(x, do, borders: tuple[int, ...], size: int):
    """Outputs and gradients of ``size`` context-parallel shards, computed one after the other."""
    from k3train.kernels.kda.triton_kda import Ends, triton_kda
    from k3train.kernels.packing import make_packing

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
        o, _ = triton_kda(*part, gate_lower_bound=BOUND, packing=packing, exchange=exchange, ends=ends)
        outputs.append(o)
        parts.append(part)
    exchange.state = None
    pieces = do.chunk(size, 1)
    grads = [torch.autograd.grad(outputs[r], parts[r], pieces[r]) for r in reversed(range(size))][::-1]
    joined = [torch.cat(g, 1) if g[0].ndim > 2 else torch.stack(g).sum(0) for g in zip(*grads, strict=True)]
    return torch.cat(outputs, 1), None, joined


def section_cut(out: dict, h: int) -> None:
    """Segments and shards against the token recurrence in float64; two runs bitwise equal."""
    one, many = (0, 512), DOCUMENTS
    crossing = (0, 30, 250, 251, 512)
    cases = [(r, one, n, 1) for r in REGIMES for n in (2, 3)] + [("mixed", many, 1, 1), ("slow", many, 2, 1)]
    cases += [(r, one, 9, 4) for r in REGIMES] + [("slow", one, 1, 2), ("slow", crossing, 1, 4)]
    cases += [("mixed", crossing, 9, 2), ("slow", many, 9, 4)]
    for regime, borders, longest, size in cases:
        x = make(1, 512, h, regime, seed=longest)
        do = torch.randn(1, 512, h, 128, device="cuda").to(torch.bfloat16)
        torch.full((1 << 28,), float("nan"), device="cuda")
        with cut_into(longest):
            runs = [
                shards(x, do, borders, size) if size > 1 else gradients(ours, x, do, borders=borders)
                for _ in range(2)
            ]
        (o, _, g), (o2, _, g2) = runs
        same = torch.equal(o, o2) and all(torch.equal(p, r) for p, r in zip(g, g2, strict=True))
        ro, rg = reference(x, do, borders)
        row = {"o": relative(o, ro)}
        row |= {n: relative(p, r) for n, p, r in zip(NAMES, g, rg, strict=True)}
        key = f"h{h} {regime} {len(borders) - 1} documents, segments of {longest} chunks, {size} shards"
        out.setdefault("cut", {})[key] = row | {"repeat": same}
        text = " ".join(f"{n} {e:.1e}" for n, e in row.items())
        print(key, text, "bitwise" if same else "NOT REPEATABLE", flush=True)


def section_long(out: dict) -> None:
    """A long document whole, cut and in shards: how far the results lie apart."""
    t, h = 16384, 4
    for regime in REGIMES:
        x = make(1, t, h, regime)
        do = torch.randn(1, t, h, 128, device="cuda").to(torch.bfloat16)
        with cut_into(1 << 20):
            o, _, g = gradients(ours, x, do)
        for name, longest, size in (
            ("cut", 16, 1),
            ("cut", 50, 1),
            ("shards", 1 << 20, 2),
            ("shards", 20, 4),
        ):
            with cut_into(longest):
                o2, _, g2 = shards(x, do, (0, t), size) if size > 1 else gradients(ours, x, do)
            row = {n: relative(a, b) for n, a, b in zip(("o", *NAMES), (o2, *g2), (o, *g), strict=True)}
            key = f"{regime} {name} {longest} {size}"
            out.setdefault("long", {})[key] = row
            print(key, " ".join(f"{n} {e:.1e}" for n, e in row.items()), flush=True)


def section_sweep(out: dict, h: int = 16, t: int = 131072, *blocks: int) -> None:
    """Every kind of chain alone, by segments of one document and value channels of a program."""
    from dataclasses import replace

    import k3train.kernels.kda.triton_kda as T
    from k3train.kernels.kda import segments
    from k3train.kernels.kda import triton_states as S

    q, k, v, z, beta, a, bias = (y.detach() for y in make(1, t, h, "mixed"))
    q, k, v, z, beta = (y[0] for y in (q, k, v, z, beta))
    call = T._Call((0, t), h, T.Ends(), None, BOUND, q.device)
    x = T._operands(q, k, z, beta, a, bias, call)
    n = call.num_chunks
    o, s = torch.empty_like(v), x["dec"].new_zeros(64, h, 128, 128)
    hs, us = q.new_empty(n, h, 128, 128), q.new_empty(n, h, 64, 128)
    for block, parts in product(blocks or (128, 64, 32), (1, 2, 3, 4, 5, 6, 8, 12, 16)):
        tables = [segments.tables((0, t), h, T.Ends(), b, -(-n // parts), q.device) for b in (False, True)]
        f, b = (replace(y, blocks=dict.fromkeys(segments.SPEED, block)) for y in tables)
        row = {
            "output": median(lambda f=f: S.chain(x, v, f, "output", s, None, o=o), 0.02),
            "states": median(lambda f=f: S.chain(x, v, f, "states", s, None, hs=hs, us=us), 0.02),
            "back": median(lambda b=b: S.chain_back(x, o, b, "back", s, None, dhs=hs, dv=us), 0.02),
        }
        if parts > 1:
            row["maps"] = median(lambda f=f: S.chain(x, v, f, "maps", None, s), 0.02)
            row["back maps"] = median(lambda b=b: S.chain_back(x, o, b, "back maps", None, s), 0.02)
            row["scan"] = median(lambda f=f: S._scan(f, "enter", s, s, states=s), 0.02)
        key = f"H{h} T{t} {block} channels {parts} segments"
        out.setdefault("sweep", {})[key] = row
        print(key, " ".join(f"{name} {ms:.3f}" for name, ms in row.items()), flush=True)


def median(fn, seconds: float = 0.25) -> float:
    """Milliseconds, the median of single calls timed with device events."""
    fn()
    torch.cuda.synchronize()
    start = time.time()
    fn()
    torch.cuda.synchronize()
    n = max(5, min(60, int(seconds / max(time.time() - start, 1e-4))))
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(n)]
    for a, b in pairs:
        a.record()
        fn()
        b.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in pairs)[n // 2]


def borders_of(t: int, documents: int) -> tuple[int, ...] | None:
    return None if documents == 1 else tuple(t * i // documents for i in range(documents + 1))


SHAPES = (
    (1, 8192, 96, 1),
    (1, 8192, 16, 1),
    (1, 65536, 16, 16),
    (8, 1024, 96, 1),
    (1, 131072, 16, 1),
    (1, 32768, 96, 1),
)


def time_one(fn, b: int, t: int, h: int, documents: int) -> dict:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    x = make(b, t, h, "mixed")
    do = torch.randn(b, t, h, 128, device="cuda").to(torch.bfloat16)
    borders = borders_of(t, documents)
    with torch.no_grad():
        forward = median(lambda: fn(*x, borders=borders))
    both = median(lambda: gradients(fn, x, do, borders=borders))
    return {"fwd": forward, "fwd+bwd": both, "peak GB": torch.cuda.max_memory_allocated() / 1e9}


def kernels(fn, b: int, t: int, h: int, documents: int) -> dict[str, float]:
    """Milliseconds a kernel of one forward and backward, from the profiler."""
    from torch.profiler import ProfilerActivity, profile

    x = make(b, t, h, "mixed")
    do = torch.randn(b, t, h, 128, device="cuda").to(torch.bfloat16)
    borders = borders_of(t, documents)
    gradients(fn, x, do, borders=borders)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(5):
            gradients(fn, x, do, borders=borders)
        torch.cuda.synchronize()
    rows = [
        (e.self_device_time_total / 5e3, e.count / 5, e.key[:60])
        for e in p.key_averages()
        if e.self_device_time_total > 0
    ]
    return {f"{n} x{c:.0f}": round(ms, 4) for ms, c, n in sorted(rows, reverse=True)[:16]}


def section_time(out: dict, who: str = "ours") -> None:
    fn = {"ours": ours, "fla": fla}[who]
    for b, t, h, documents in SHAPES:
        key = f"{who} B{b} T{t} H{h} documents {documents}"
        try:
            row = time_one(fn, b, t, h, documents)
        except torch.OutOfMemoryError as e:
            print(key, e, flush=True)
            continue
        if who == "ours" and (b, t) in ((1, 8192), (1, 131072)):
            kept = time_one(partial(fn, keep_operands=True), b, t, h, documents)
            row |= {f"{n}, operands kept": e for n, e in kept.items() if n != "fwd"}
        out.setdefault("time", {})[key] = row
        print(key, " ".join(f"{n} {e:.3f}" for n, e in row.items()), flush=True)
        if (b, t) in ((1, 8192), (1, 65536), (1, 131072)):
            out.setdefault("kernels", {})[key] = r = kernels(fn, b, t, h, documents)
            print("   ", "; ".join(f"{n} {ms}" for n, ms in r.items()), flush=True)


def section_once(out: dict, t: int = 8192, h: int = 96, documents: int = 1) -> None:
    """Two forwards and backwards, for a profiler or a memory checker around this process.

    A short buffer holds documents of 1, t / 3 - 1 and the rest of the tokens, cut into single chunks.
    """
    x = make(1, t, h, "mixed")
    do = torch.randn(1, t, h, 128, device="cuda").to(torch.bfloat16)
    for _ in range(2):
        if t > 1000:
            gradients(ours, x, do, borders=borders_of(t, documents))
            continue
        with cut_into(1):
            gradients(ours, x, do, borders=(0, 1, t // 3, t))
    torch.cuda.synchronize()
    out["done"] = True


def environment() -> dict:
    import triton
    from triton import knobs

    from k3train.kernels.kda.triton_kda import is_available

    p = torch.cuda.get_device_properties(0)
    x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    y = torch.empty_like(x)
    copy = 2 * x.numel() / median(lambda: y.copy_(x)) / 1e6
    return {
        "device": p.name,
        "processors": p.multi_processor_count, "torch": torch.__version__, 
        "triton": triton.__version__,
        "available": is_available("cuda", torch.bfloat16, 128, BOUND), 
        "ptxas": knobs.nvidia.ptxas.version, "copy GB/s": round(copy),
    }  # fmt: skip


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--budget", type=float, default=300)
    arguments.add_argument("--sections", default="stages,check:96,check:16,check:1,check:3,cut:2,long,time")
    arguments.add_argument("--out", default=os.environ.get("OUT", "."))
    arguments.add_argument("--section")
    a = arguments.parse_args()
    if a.section:
        name, *rest = a.section.split(":")
        out: dict = {}
        try:
            globals()[f"section_{name}"](out, *(int(r) if r.isdigit() else r for r in rest))
        finally:
            Path(a.out, f"{a.section.replace(':', '-')}.json").write_text(json.dumps(out, indent=1))
        return
    start = time.time()
    print(environment(), flush=True)
    parallel = [s for s in a.sections.split(",") if s.startswith(("stages", "check", "cut", "long"))]
    serial = [s for s in a.sections.split(",") if s not in parallel]

    def launch(section: str) -> tuple[str, subprocess.Popen[str]]:
        command = [sys.executable, __file__, "--section", section, "--out", a.out]
        return section, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def finish(section: str, process: subprocess.Popen[str], limit: float) -> None:
        try:
            text, _ = process.communicate(timeout=max(limit, 1))
        except subprocess.TimeoutExpired:
            process.kill()
            text = (process.communicate()[0] or "") + f"\n{section}: TIME LIMIT"
        print(f"== {section} [{time.time() - start:.0f} s]\n{text[-9000:]}", flush=True)

    running = [launch(s) for s in parallel]
    for section, process in running:
        finish(section, process, min(0.5 * a.budget, a.budget - (time.time() - start)))
    for s in serial:
        if a.budget - (time.time() - start) > 10:
            finish(*launch(s), limit=a.budget - (time.time() - start))


if __name__ == "__main__":
    main()
