"""Gather a sweep over optimizers, rates and seeds into a JSON file, and write its tables into docs/optim.md.

    python docs/studies/compare_optimizers.py --collect runs/optimizers
    python docs/studies/compare_optimizers.py

The second line makes the tables again from the file.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from k3train.config.compose import load_resolved
from k3train.config.problems import BadInput
from k3train.monitor.metrics_file import METRICS, read_records

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "studies" / "results" / "optimizers.json"
PAGE = ROOT / "docs" / "optim.md"
BEGIN, END = "<!-- tables: compare_optimizers.py -->\n", "<!-- end of tables -->\n"


def read_run(folder: Path) -> dict[str, Any]:
    """What the comparison needs of one finished run. Raises BadInput when it is not finished."""
    run = load_resolved(str(folder / "run.yaml"))
    records = list(read_records(folder / METRICS))
    if not any(each["kind"] == "event" and each["event"] == "finished" for each in records):
        raise BadInput(f"{folder} has not finished; the same command goes on with it")
    evals = [each for each in records if each["kind"] == "eval"]
    return {
        "optimizer": run.optim.optimizer.value,
        "learning_rate": run.optim.learning_rate,
        "seed": run.seed,
        "tokens": evals[-1]["tokens"],
        "heldout_loss": evals[-1]["loss"],
    }


def best_rates(runs: list[dict[str, Any]]) -> dict[str, float]:
    """For each optimizer the rate with the lowest loss, over the seeds that all its rates have."""
    best = {}
    for optimizer in dict.fromkeys(run["optimizer"] for run in runs):
        own = [run for run in runs if run["optimizer"] == optimizer]
        rates = {run["learning_rate"] for run in own}
        shared = set.intersection(*({r["seed"] for r in own if r["learning_rate"] == rate} for rate in rates))
        losses = {
            rate: statistics.mean(
                r["heldout_loss"] for r in own if r["learning_rate"] == rate and r["seed"] in shared
            )
            for rate in rates
        }
        best[optimizer] = min(losses, key=losses.__getitem__)
    return best


def tables(results: dict[str, Any]) -> str:
    """Held-out losses by rate on the first seed, then of all seeds at each optimizer's best rate."""
    runs = results["runs"]
    rates, seeds = (sorted({run[key] for run in runs}) for key in ("learning_rate", "seed"))
    found = {(run["optimizer"], run["learning_rate"], run["seed"]): run["heldout_loss"] for run in runs}
    best = best_rates(runs)

    def lines() -> Iterator[str]:
        yield f"| seed {seeds[0]}, rate | {' | '.join(f'{rate:g}' for rate in rates)} |"
        yield f"|---|{'---|' * len(rates)}"
        for optimizer in best:
            losses = (found.get((optimizer, rate, seeds[0])) for rate in rates)
            yield f"| {optimizer} | {' | '.join('' if x is None else f'{x:.4f}' for x in losses)} |"
        yield ""
        yield f"| at its best rate | {' | '.join(f'seed {seed}' for seed in seeds)} | mean | spread |"
        yield f"|---|{'---|' * (len(seeds) + 2)}"
        for optimizer, rate in best.items():
            losses = [found[optimizer, rate, seed] for seed in seeds]
            cells = [f"{x:.4f}" for x in (*losses, statistics.mean(losses), max(losses) - min(losses))]
            yield f"| {optimizer}, {rate:g} | {' | '.join(cells)} |"

    return "\n".join(lines()) + "\n"


def main() -> None:
    """Collect when asked to, then write the tables between their two marks in the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--collect", type=Path, metavar="RUNS", help="folder of the runs")
    options = parser.parse_args()
    if options.collect:
        runs = [read_run(path.parent) for path in sorted(options.collect.rglob("run.yaml"))]
        if len({run["tokens"] for run in runs}) != 1:
            raise SystemExit(f"{options.collect} has no runs, or runs of different lengths")
        runs.sort(key=lambda run: (run["optimizer"], run["learning_rate"], run["seed"]))
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        content = {"torch": version("torch"), "runs": runs}
        RESULTS.write_text(json.dumps(content, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{tables(json.loads(RESULTS.read_text()))}\n{END}{after}")


if __name__ == "__main__":
    main()
