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
from itertools import pairwise
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
        table = T._table((0, t), q.device)
        got = T._operands(q, k, z, beta, x[5], x[6], BOUND, table)
        row = {}
        for name in ("kh", "kt", "qh", "aqk", "tb", "dec"):
            row[name] = relative(got[name].transpose(0, 1), want[name])
        o, final = T._Kda.apply(q, k, v, z, beta, x[5], x[6], s0, BOUND, table, True)
        row["o"], row["final"] = relative(o, want["o"]), relative(final[0], want["final"])
        keep = {}
        inner = T._input_gradients

        def spy(*a, keep=keep, inner=inner):
            keep.update(us=a[9], dv=a[10], hs=a[11], dhs=a[12])
            return inner(*a)

        T._input_gradients = spy
        g = T._backward(q, k, v, z, beta, x[5], x[6], s0, o, do, ds.contiguous(), BOUND, table)
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
        out.setdefault("time", {})[key] = row
        print(key, " ".join(f"{n} {e:.3f}" for n, e in row.items()), flush=True)
        if (b, t) in ((1, 8192), (1, 131072)):
            out.setdefault("kernels", {})[key] = r = kernels(fn, b, t, h, documents)
            print("   ", "; ".join(f"{n} {ms}" for n, ms in r.items()), flush=True)


def section_settings(out: dict) -> None:
    """The chain kernels under other splits of the value channels."""
    import k3train.kernels.kda.triton_kda as T

    for h, t in ((96, 8192), (16, 8192)):
        for block_v, warps, depth in (
            (128, 8, 2),
            (64, 8, 2),
            (64, 4, 1),
            (64, 4, 2),
            (32, 4, 2),
            (32, 4, 3),
            (64, 8, 3),
        ):
            T._Shapes.__init__ = lambda s, h, table, v=(block_v, warps, depth): s.__dict__.update(
                zip(("block_v", "warps", "stages"), v, strict=True)
            )
            key = f"H{h} T{t} BV{block_v} warps {warps} stages {depth}"
            try:
                r = kernels(ours, 1, t, h, 1)
            except Exception as e:
                print(key, repr(e)[:160], flush=True)
                continue
            r = {n: ms for n, ms in r.items() if "chain" in n}
            out.setdefault("settings", {})[key] = r
            print(key, r, flush=True)


def section_once(out: dict, t: int = 8192, h: int = 96) -> None:
    """Two forwards and backwards, for a profiler or a memory checker around this process."""
    x = make(1, t, h, "mixed")
    do = torch.randn(1, t, h, 128, device="cuda").to(torch.bfloat16)
    borders = None if t > 1000 else (0, 1, t // 3, t)
    for _ in range(2):
        gradients(ours, x, do, borders=borders)
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
    arguments.add_argument("--sections", default="stages,check:96,check:16,check:1,check:3,time,settings")
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
    parallel = [s for s in a.sections.split(",") if s.startswith(("stages", "check"))]
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
        print(f"== {section} [{time.time() - start:.0f} s]\n{text[-5000:]}", flush=True)

    running = [launch(s) for s in parallel]
    for section, process in running:
        finish(section, process, min(0.5 * a.budget, a.budget - (time.time() - start)))
    for s in serial:
        if a.budget - (time.time() - start) > 10:
            finish(*launch(s), limit=a.budget - (time.time() - start))


if __name__ == "__main__":
    main()
