"""Gather the runs of a sweep over routing rules into one small JSON file, which plot_balance.py draws.

    python docs/studies/collect_balance.py runs/balance_debug-sweep --out docs/studies/results/debug.json

Runs are told apart by their rule and seed, as their run.yaml has them.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from pathlib import Path
from typing import Any

from k3train.config.compose import load_resolved
from k3train.config.problems import BadInput
from k3train.config.schema import Run
from k3train.monitor.metrics_file import METRICS, read_records, read_steps


def name_of(run: Run) -> str:
    """The rule and those of its settings that are not the defaults."""
    router, default = run.model.moe.router, type(run.model.moe.router)()
    parts = [router.rule.value]
    if router.quantile.window != default.quantile.window:
        parts.append(f"window {router.quantile.window}")
    if router.quantile.strength != default.quantile.strength:
        parts.append(f"strength {router.quantile.strength:g}")
    if router.sign.rate != default.sign.rate:
        parts.append(f"{router.sign.rate:g}")
    if router.aux_loss.coefficient != default.aux_loss.coefficient:
        parts.append(f"{router.aux_loss.coefficient:g}")
    return " ".join(parts)


def read_run(folder: Path) -> dict[str, Any]:
    """What the study needs of one finished run. Raises BadInput when it is not finished."""
    steps = read_steps(folder / METRICS)
    records = list(read_records(folder / METRICS))
    if not any(each["kind"] == "event" and each["event"] == "finished" for each in records):
        raise BadInput(f"{folder} has not finished; the same sweep command goes on with it")
    losses = [each for each in records if each["kind"] == "eval"]
    return {
        "heldout_loss": losses[-1]["loss"],
        "max_violation": [four(step.router_max_violation) for step in steps],
        "load_cv": [four(step.router_cv) for step in steps],
        "dead_experts": [step.dead_experts for step in steps],
        "median_step_seconds": four(statistics.median(step.step_seconds for step in steps)),
        "tokens": steps[-1].tokens,
    }


def four(value: float | None) -> float | None:
    """Four digits."""
    return None if value is None else float(f"{value:.4g}")


def main() -> None:
    """Read every run of the sweep's folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    runs: dict[str, dict[str, Any]] = {}
    shape: dict[str, Any] = {}
    for path in sorted(options.sweep.rglob("run.yaml")):
        run = load_resolved(str(path))
        moe = run.model.moe
        stage = run.curriculum.stages[run.curriculum.order[0]]
        shape = {"experts": moe.num_experts, "top_k": moe.top_k, "tokens": stage.batch_tokens}
        runs.setdefault(name_of(run), {})[str(run.seed)] = read_run(path.parent)
    if not runs:
        raise SystemExit(f"{options.sweep} has no runs: start launch/sweep.py first")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    content = {**shape, "machine": platform.machine(), "runs": runs}
    options.out.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{sum(map(len, runs.values()))} runs, {len(runs)} rules: {options.out}")


if __name__ == "__main__":
    main()
