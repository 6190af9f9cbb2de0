"""Routers alone, on made-up scores: how each balancing rule moves the bias, step by step.

    python docs/studies/simulate_routers.py [--only SECTION,...] [--device cuda] [--out FILE]

Every rule is the package's own (k3train/router). A token is a Gaussian vector x, its logit for expert j is
w_j . x + o_j; the offsets o_j make the start strongly skewed, and a step is one batch of fresh tokens. No
weight is trained, so that all that moves is the bias. The result is a JSON file, which plot_balance.py draws.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3train.config import schema
from k3train.router.audit import Audit
from k3train.router.choose import make_rule
from k3train.router.metrics import COLUMNS, balance_table
from k3train.router.select import Tally, select

RESULTS = Path(__file__).parent / "results" / "simulation.json"
WIDTH = 32
Rule, Scope = schema.RouterRule, schema.BalanceScope
Batches = Iterator[Tensor]
"""Logits of one step after another, fp32 [tokens, experts]."""


class World:
    """Experts' weights and offsets; draws batches of logits."""

    def __init__(self, experts: int, seed: int, device: str = "cpu", skew: float = 1.0) -> None:
        self.device = device
        self.g = torch.Generator(device).manual_seed(seed)
        self.weight = self.randn(experts, WIDTH) / math.sqrt(WIDTH)
        self.offset = skew * self.randn(experts) - 1.0

    def randn(self, *shape: int) -> Tensor:
        """Of this world's own generator."""
        return torch.randn(*shape, generator=self.g, device=self.device)

    def logits(self, x: Tensor) -> Tensor:
        """[tokens, WIDTH] -> [tokens, experts]"""
        return 1.5 * x @ self.weight.T + self.offset

    def independent(self, tokens: int) -> Batches:
        """Fresh Gaussian tokens for ever."""
        while True:
            yield self.logits(self.randn(tokens, WIDTH))

    def shifting(self, tokens: int, every: int, size: float) -> Batches:
        """Two domains, whose means lie ``size`` apart, in turns of ``every`` batches."""
        mean = self.randn(WIDTH)
        mean *= size / 2 / mean.norm()
        step = 0
        while True:
            side = 1 if step // every % 2 else -1
            yield self.logits(self.randn(tokens, WIDTH) + side * mean)
            step += 1

    def clustered(self, tokens: int, clusters: int, spread: float) -> Batches:
        """Tokens around ``clusters`` centres of Zipf frequency; with spread 0 they are copies of them."""
        centres = self.randn(clusters, WIDTH)
        weights = 1 / torch.arange(1, clusters + 1, device=self.device)
        while True:
            which = torch.multinomial(weights, tokens, replacement=True, generator=self.g)
            yield self.logits(centres[which] + spread * self.randn(tokens, WIDTH))


def simulate(
    batches: Batches,
    router: schema.Router,
    top_k: int,
    steps: int,
    *,
    micro_batches: int = 1,
    audit: bool = False,
    until: float = 0.0,
) -> list[dict[str, float]]:
    """The balance of each step, the first under a zero bias; ends early below ``until`` in max violation."""
    out: list[dict[str, float]] = []
    rule = bias = loads = None
    for _, logits in zip(range(steps), batches, strict=False):
        if rule is None or bias is None or loads is None:
            rule = make_rule(router, logits.shape[1], top_k).to(logits.device)
            bias = logits.new_zeros(logits.shape[1])
            loads = bias.long()
        bounds = rule.bounds(bias)
        look = Audit(top_k) if audit else None
        for part in logits.chunk(micro_batches):
            _, cutoff = select(part, bias, top_k, Tally(loads, rule.histogram, bounds, None))
            rule.observe(part, cutoff, None)
            if look is not None:
                look.observe(part, cutoff, None)
        statistics = rule.statistics()
        saturated = rule.saturated(loads, statistics)
        new = rule.next_bias(bias, bounds, loads, statistics)
        row = balance_table(loads[None], bias[None], new[None], saturated[None], top_k)[0].tolist()
        out.append(dict(zip(COLUMNS, row, strict=True)))
        if look is not None:
            out[-1].update(look.report(new, None))
        bias = new
        loads.zero_()
        rule.reset()
        if out[-1]["max_violation"] < until:
            break
    return out


def router(rule: Rule = Rule.quantile, **changes: Any) -> schema.Router:
    """Settings of one rule."""
    scope = changes.pop("scope", Scope.global_batch)
    rate = changes.pop("rate", 0.001)
    return schema.Router(
        rule=rule,
        quantile=schema.Quantile(**changes),
        quantile_exact=schema.QuantileExact(scope=scope),
        sign=schema.SignBias(rate=rate),
    )


def floor(tokens: int, experts: int, top_k: int, draws: int = 200) -> float:
    """Mean largest violation of ``experts`` loads that independent tokens give under a perfect bias."""
    mean = tokens * top_k / experts
    g = torch.Generator().manual_seed(0)
    loads = torch.poisson(torch.full((draws, experts), mean), generator=g)
    return float((loads.amax(-1) / mean - 1).mean())


def conditions(experts: int, top_k: int, tokens: int) -> dict[str, Any]:
    """What a section's numbers were found with."""
    return {"experts": experts, "top_k": top_k, "tokens": tokens, "floor": floor(tokens, experts, top_k)}


def start(seeds: list[int], device: str) -> dict[str, Any]:
    """896 experts, top-16, 1,024 tokens an expert and step, from a strongly skewed start."""
    experts, top_k, tokens = 896, 16, 57_344
    rules = {
        "quantile": (router(), 8),
        "quantile_exact": (router(Rule.quantile_exact), 6),
        "sign 0.001": (router(Rule.sign), 400),
    }
    curves: dict[str, list[list[float]]] = {}
    for name, (settings, steps) in rules.items():
        # What takes long on a CPU is followed for one seed only; seeds differ little.
        for seed in seeds if name == "quantile" or device != "cpu" else seeds[:1]:
            run = simulate(
                World(experts, seed, device).independent(tokens),
                settings,
                top_k,
                steps,
                until=0.25 if name.startswith("sign") else 0.0,
            )
            curves.setdefault(name, []).append([row["max_violation"] for row in run])
            print(name, seed, len(run), [round(v, 3) for v in curves[name][-1][:10]], flush=True)
    return {**conditions(experts, top_k, tokens), "max_violation": curves}


def bins(seeds: list[int], device: str) -> dict[str, Any]:
    """Balance that is reached and error against the exact quantile, by number of bins."""
    experts, top_k, tokens, settle, measure = 128, 8, 8192, 5, 3
    rows = {}
    for count in (64, 128, 256, 512, 1000, 2048, 4096):
        found = []
        for seed in seeds:
            batches = World(experts, seed, device).independent(tokens)
            found += simulate(batches, router(bins=count), top_k, settle + measure, audit=True)[settle:]
        rows[count] = mean_of(found, "max_violation", "load_cv", "exact_error", "own_violation")
        print("bins", count, rows[count], flush=True)
    return {**conditions(experts, top_k, tokens), "rows": rows}


def smoothing(seeds: list[int], device: str) -> dict[str, Any]:
    """Window and strength on independent batches and on two domains in turns of 1 and of 8 batches."""
    experts, top_k, tokens, steps, settle = 64, 4, 4096, 48, 16
    worlds: dict[str, Callable[[World], Batches]] = {
        "independent": lambda world: world.independent(tokens),
        "domain changes every step": lambda world: world.shifting(tokens, 1, 2.0),
        "domain changes every 8 steps": lambda world: world.shifting(tokens, 8, 2.0),
    }
    kinds = {
        **{f"window {w}": router(window=w) for w in (1, 2, 4, 8, 16)},
        **{f"strength {s}": router(strength=s) for s in (0.5, 0.25, 0.1)},
        "sign 0.001": router(Rule.sign),
        "sign 0.01": router(Rule.sign, rate=0.01),
    }
    rows: dict[str, dict[str, Any]] = {}
    for world_name, make in worlds.items():
        for name, settings in kinds.items():
            found, curves = [], []
            for seed in seeds:
                run = simulate(make(World(experts, seed, device)), settings, top_k, steps)
                found += run[settle:]
                curves.append([row["max_violation"] for row in run])
            rows.setdefault(world_name, {})[name] = {
                **mean_of(found, "max_violation", "load_cv", "causal_lag", "bias_drift"),
                "curve": curves[0],
            }
        print(world_name, {k: round(v["max_violation"], 3) for k, v in rows[world_name].items()}, flush=True)
    return {**conditions(experts, top_k, tokens), "rows": rows}


def clusters(seeds: list[int], device: str) -> dict[str, Any]:
    """Few and uneven clusters of tokens, as copies and with a spread; and a batch in ever smaller parts."""
    experts, top_k, tokens, steps, settle = 64, 4, 4096, 24, 16
    rows: dict[str, Any] = {}
    for count in (16, 64, 256, 1024, 8192):
        for spread in (0.0, 0.3):
            found = []
            for seed in seeds:
                batches = World(experts, seed, device).clustered(tokens, count, spread)
                found += simulate(batches, router(), top_k, steps)[settle:]
            rows[f"{count} clusters, spread {spread}"] = mean_of(
                found, "max_violation", "load_cv", "dead_experts", "causal_lag"
            )
        print("clusters", count, rows[f"{count} clusters, spread 0.0"], flush=True)
    parts: dict[str, dict[str, Any]] = {"histogram over the step": {}, "quantiles averaged": {}}
    settings = (router(), router(Rule.quantile_exact, scope=Scope.micro_batch))
    for (name, column), setting in zip(parts.items(), settings, strict=True):
        for each in (4096, 1024, 256, 64, 32):
            found = []
            for seed in seeds:
                batches = World(experts, seed, device).clustered(tokens, 1024, 0.3)
                found += simulate(batches, setting, top_k, steps, micro_batches=tokens // each)[settle:]
            column[each] = mean_of(found, "max_violation", "load_cv")
        print(name, {k: round(v["max_violation"], 3) for k, v in column.items()}, flush=True)
    return {**conditions(experts, top_k, tokens), "rows": rows, "micro_batches": parts}


def mean_of(rows: list[dict[str, float]], *names: str) -> dict[str, float]:
    """Mean of each named number, to 4 digits."""
    return {name: float(f"{sum(row[name] for row in rows) / len(rows):.4g}") for name in names}


SECTIONS = {"start": start, "bins": bins, "smoothing": smoothing, "clusters": clusters}


def main() -> None:
    """Run the sections and write what they found; sections that are not run keep what the file holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--device", default="cpu", help="where scores are drawn: cuda takes seconds, cpu minutes"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(f"argument --only: there is no section {unknown[0]!r}; use {', '.join(SECTIONS)}")
    if options.seeds < 1:
        parser.error(f"argument --seeds: {options.seeds} is no number of seeds; use 1 or more")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: torch sees no GPU for cuda; use cpu")
    torch.set_num_threads(1)
    out = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in names:
        began = time.process_time()
        found = SECTIONS[name](list(range(1, options.seeds + 1)), options.device)
        out[name] = {
            **found,
            "seeds": options.seeds,
            "cpu_seconds": round(time.process_time() - began, 1),
            "torch": torch.__version__,
            "machine": torch.cuda.get_device_name() if options.device == "cuda" else platform.machine(),
        }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(rounded(out), indent=1) + "\n")


def rounded(value: Any) -> Any:
    """Floats to 4 digits, and lists of numbers kept on few characters."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
