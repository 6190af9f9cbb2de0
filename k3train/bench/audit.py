"""Numeric audit of Kimi Delta Attention: exponents, errors to float64, and which dtypes can carry it.

Inside a tile of T tokens the decay from token j to token i is a product of two factors, centred so that both
stay within e^(+-|bound| T / 2). A kernel that multiplies tiles on matrix units holds these factors in the
operands' dtype, so the dtype's exponent range, not its precision, decides what T and bound are possible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from k3train.bench.case_kda import fla_kda
from k3train.bench.kda_inputs import GRADIENTS, REGIMES, kda_inputs
from k3train.bench.machine import version
from k3train.bench.work import Shape
from k3train.kernels.kda.chunk_plan import CHUNK, TILE, make_plan
from k3train.kernels.kda.chunked import kda_chunked
from k3train.kernels.kda.reference import bounded_gate, kda_reference, l2_normalise
from k3train.kernels.kda.triton_kda import is_available, triton_kda
from k3train.kernels.kda.within_chunk import make_decays, sum_before

PEER = "fla-core"
"""Its errors stand beside ours; the verdict is on ours alone."""
BUILT_FOR = -5.0
"""Strongest bound that the chunked paths accept."""
LIMIT, LIMIT_SUMS = 2e-2, 5e-2
"""Largest relative error that passes; for A_log and dt_bias, sums of terms of both signs, the second."""
SEEDS = 4
"""Draws of inputs in each regime: one alone says little of A_log's gradient, a sum of both signs per head."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def largest_tile(bound: float, dtype: torch.dtype) -> int:
    """Tokens of the largest tile whose centred factors, e^(|bound| T / 2), are numbers of ``dtype``."""
    return int(2 * math.log(torch.finfo(dtype).max) / -bound)


def audit(shape: Shape, bound: float, device: torch.device) -> dict[str, Any]:
    """Everything that ``k3train bench kda --audit`` prints."""
    sizes = shape["batch"], shape["tokens"], shape["heads"], shape["head_dim"]
    paths = _paths(bound, device, sizes[-1])
    found: dict[str, Any] = {
        "bound": bound,
        "shape": dict(shape),
        "seeds": SEEDS,
        "tile": TILE,
        "chunk": CHUNK,
        "largest_tile": {name: largest_tile(bound, dtype) for name, dtype in DTYPES.items()},
        "operands": [_operands(regime, sizes, bound, device) for regime in REGIMES],
        "not_run": {name: reason for name, (_, _, reason) in paths.items() if reason},
    }
    found["errors"] = [
        row
        for regime in REGIMES
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for row in _errors(
            {name: run for name, (run, dtypes, why) in paths.items() if not why and dtype in dtypes},
            (kda_inputs(regime, sizes, device=device, dtype=dtype, seed=seed) for seed in range(SEEDS)),
            bound,
            {"regime": regime, "dtype": _name(dtype)},
            found["not_run"],
        )
    ]
    found["verdict"] = {name: _verdict(found, name) for name in DTYPES}
    return found


Run = Callable[[list[Tensor], float], Tensor]


def _paths(
    bound: float, device: torch.device, head_dim: int
) -> dict[str, tuple[Run, list[torch.dtype], str]]:
    """By name: the path, the dtypes of inputs it takes, and why it is not run, if so."""
    strong = f"built for bounds in [{BUILT_FOR:g}, 0)" if bound < BUILT_FOR else ""
    fast, reason = is_available(device, torch.bfloat16, head_dim, bound)
    inputs = [torch.bfloat16, torch.float16, torch.float32]
    return {
        "reference": (_reference, inputs, ""),
        "chunked torch": (_chunked, inputs, strong),
        "Hopper kernels": (_hopper, [torch.bfloat16], "" if fast else reason),
        PEER: (fla_kda, [torch.bfloat16], _no_peer(device)),
    }


def _no_peer(device: torch.device) -> str:
    if version(PEER) is None:
        return f"the package {PEER} is not installed"
    return "" if device.type == "cuda" else "it runs on GPUs only"


def _reference(x: list[Tensor], bound: float) -> Tensor:
    q, k, v, z, beta, a_log, bias = x
    return kda_reference(q, k, v, z, beta, a_log, bias, gate_lower_bound=bound)[0]


def _chunked(x: list[Tensor], bound: float) -> Tensor:
    q, k, v, z, beta, a_log, bias = x
    return kda_chunked(q, k, v, z, beta, a_log, bias, gate_lower_bound=bound)[0]


def _hopper(x: list[Tensor], bound: float) -> Tensor:
    q, k, v, z, beta, a_log, bias = x
    return triton_kda(q, k, v, z, beta, a_log, bias, gate_lower_bound=bound)[0]


def _errors(
    paths: dict[str, Run],
    draws: Iterable[list[Tensor]],
    bound: float,
    names: dict[str, str],
    not_run: dict[str, str],
) -> Iterator[dict[str, Any]]:
    """A row for each path: root mean squares over ``draws`` of the norms of its differences to the token
    recurrence in float64 on the same inputs, each over the recurrence's norm.

    ``not_run`` gets the reason where the peer fails.
    """
    squares: dict[str, list[Tensor]] = {name: [] for name in paths}
    for x in draws:
        generator = torch.Generator(device=x[2].device).manual_seed(1)
        grad = torch.randn(x[2].shape, device=x[2].device, generator=generator).to(x[2].dtype)
        want = _all_of(_reference, [t.detach().double().requires_grad_() for t in x], grad.double(), bound)
        for name in [name for name in paths if name not in not_run]:
            try:
                got = _all_of(paths[name], x, grad, bound)
            except Exception as error:
                if name != PEER:
                    raise
                not_run[name] = f"{names['regime']}: {error!r}"
                continue
            pairs = zip(got, want, strict=True)
            ratios = [(a.double() - b).norm() / (b.norm() + 1e-300) for a, b in pairs]
            squares[name].append(torch.stack(ratios).square())
    for name in [name for name in paths if name not in not_run]:
        errors = torch.stack(squares[name]).mean(0).sqrt().tolist()
        finite = all(math.isfinite(error) for error in errors)
        what = dict(zip(("o", *GRADIENTS), errors, strict=True))
        yield {**names, "path": name, "finite": finite, "errors": what}


def _all_of(run: Run, x: list[Tensor], grad: Tensor, bound: float) -> tuple[Tensor, ...]:
    """The output and the gradient of every input."""
    o = run(x, bound)
    return (o.detach(), *torch.autograd.grad(o, x, grad))


def _operands(
    regime: str, sizes: tuple[int, int, int, int], bound: float, device: torch.device
) -> dict[str, Any]:
    """Exponents of the factors of one tile after another, and its scores from operands of each dtype."""
    with torch.no_grad():
        q, k, _, z, _, a_log, bias = kda_inputs(regime, sizes, device=device, dtype=torch.bfloat16)
        _, t, h, d = sizes
        n = t // CHUNK
        plan = make_plan(n * CHUNK, None, continues=False, device=device)

        def tiles(x: Tensor) -> Tensor:  # the first row, as [chunks, heads, 2, tile, channels]
            return x[0, : n * CHUNK].view(n, 2, TILE, h, d).permute(0, 3, 1, 2, 4)

        g = tiles(bounded_gate(z, a_log, bias, bound))
        decays = make_decays(plan, sum_before(plan, g.contiguous()), bound)
        log2 = torch.stack([decays.left, decays.right]).double().log2()
        rows = tiles(l2_normalise(q.float())) * decays.left
        columns = tiles(l2_normalise(k.float())) * decays.right
        mask = torch.ones(TILE, TILE, dtype=torch.bool, device=device).tril()
        exact = (rows.double() @ columns.double().mT)[..., mask]
        found: dict[str, Any] = {"regime": regime, "log2": [float(log2.min()), float(log2.max())]}
        for name, dtype in DTYPES.items():
            cast = rows.to(dtype), columns.to(dtype)
            scores = (cast[0].float() @ cast[1].float().mT)[..., mask].double()
            beyond = sum(float((~torch.isfinite(x)).sum()) for x in cast) / (2 * rows.numel())
            error = float((scores - exact).norm() / exact.norm())
            found[name] = {"overflowed": beyond, "error": error if math.isfinite(error) else None}
        return found


def _verdict(found: dict[str, Any], name: str) -> dict[str, Any]:
    """Whether operands of a dtype can carry the chunked form, and why or why not."""
    fits = found["largest_tile"][name]
    reach = -found["bound"] * TILE / 2
    limit = math.log(torch.finfo(DTYPES[name]).max)
    overflow = max(each[name]["overflowed"] for each in found["operands"])
    if fits < TILE or overflow:
        words = f"factors reach e^{reach:.0f}, above its largest number e^{limit:.1f}"
        words += f": a tile may have {fits} tokens, not {TILE}"
        return {
            "yes": False,
            "reason": f"{words}; with inputs of it the largest error is {_worst(found, name)[1]}",
        }
    worst, where = _worst(found, name)
    if worst > 1:
        return {"yes": False, "reason": f"errors too large: {where}"}
    return {"yes": True, "reason": f"factors reach e^{reach:.0f} of e^{limit:.1f}; largest error {where}"}


def _worst(found: dict[str, Any], name: str) -> tuple[float, str]:
    """Largest error over its limit among inputs of this dtype and paths of our own, and which it is."""
    worst, where = 0.0, "none measured"
    for row in found["errors"]:
        if row["dtype"] != name or row["path"] == PEER:
            continue
        for what, error in row["errors"].items():
            over = error / (LIMIT_SUMS if what in ("dA_log", "ddt_bias") else LIMIT)
            over = over if row["finite"] and math.isfinite(error) else math.inf
            if over > worst:
                worst, where = over, f"{error:.1e} in {what}, {row['path']}, {row['regime']}"
    return worst, where


def _name(dtype: torch.dtype) -> str:
    return str(dtype).split(".")[-1]


def refusal(bound: float) -> str:
    """Why the chunked form cannot hold ``bound`` at its tile size, or nothing."""
    fits = largest_tile(bound, torch.bfloat16)
    if fits >= TILE:
        return ""
    power = 2 ** int(math.log2(fits)) if fits else 0
    limit = math.log(torch.finfo(torch.bfloat16).max)
    return (
        f"--gate-lower-bound {bound:g}: factors in a tile of {TILE} tokens reach e^{-bound * TILE / 2:.0f}, "
        f"above the e^{limit:.1f} of bf16 and fp32; the largest tile that fits has {fits} tokens"
        + (f", {power} as a power of two" if power not in (fits, 0) else "")
    )
