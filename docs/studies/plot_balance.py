"""Draw the study's figures and print its tables, from its results; needs matplotlib (extra: plots).

python docs/studies/plot_balance.py [--results FOLDER] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SIMULATION = "simulation.json"
COLOURS = {
    "quantile": "#1f6fb4",
    "quantile_exact": "#7fb8e6",
    "sign": "#d1701f",
    "aux_loss": "#3f8f4f",
    "none": "#777777",
}


def colour(name: str) -> str:
    """Of a rule, whatever its settings."""
    return COLOURS[name.split()[0]]


def figure(width: float = 7.0, height: float = 3.4, columns: int = 1) -> tuple[Any, Any]:
    """A figure with axes, without the lines that carry nothing."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update(
        {
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "svg.hashsalt": "k3train",
            "svg.fonttype": "path",
        }
    )
    from matplotlib import pyplot

    return pyplot.subplots(1, columns, figsize=(width, height), layout="constrained", squeeze=False)


def save(drawn: Any, out: Path, name: str) -> None:
    """One SVG, the same bytes for the same results."""
    drawn.savefig(out / f"{name}.svg", metadata={"Date": None})


def draw_start(results: dict[str, Any], out: Path) -> None:
    """Max violation over steps from a skewed start, all steps and the first ten."""
    drawn, axes = figure(columns=2)
    for axis, first in ((axes[0][0], None), (axes[0][1], 10)):
        for name, curves in results["max_violation"].items():
            for i, curve in enumerate(curves):
                shown = curve[:first]
                label = name if i == 0 and first is None else None
                axis.plot(range(1, len(shown) + 1), shown, color=colour(name), label=label, lw=1.2)
        axis.axhline(0.25, color="black", lw=0.6, ls=":", label="0.25")
        axis.axhline(results["floor"], color="black", lw=0.6, ls="--", label="sampling floor")
        axis.set_yscale("log")
        axis.set_xlabel("step")
    axes[0][0].set_xscale("log")
    axes[0][0].set_ylabel("max violation")
    axes[0][0].legend(frameon=False, loc="center left")
    save(drawn, out, "start")


def draw_bins(results: dict[str, Any], out: Path) -> None:
    """Error of the bias, and balance that is reached, by bins."""
    drawn, axes = figure(columns=2, height=2.8)
    bins = [int(count) for count in results["rows"]]
    rows = list(results["rows"].values())
    axes[0][0].plot(bins, [row["exact_error"] for row in rows], "o-", color=COLOURS["quantile"], ms=3)
    axes[0][0].set_ylabel("largest error of a bias")
    axes[0][0].set_yscale("log")
    for key, style, label in (("max_violation", "o-", "next batch"), ("own_violation", "s--", "same batch")):
        axes[0][1].plot(bins, [row[key] for row in rows], style, color=COLOURS["quantile"], ms=3, label=label)
    axes[0][1].axhline(results["floor"], color="black", lw=0.6, ls="--", label="sampling floor")
    axes[0][1].set_ylabel("max violation")
    axes[0][1].set_ylim(bottom=0)
    axes[0][1].legend(frameon=False)
    for axis in axes[0]:
        axis.set_xscale("log", base=2)
        axis.set_xticks(bins, [str(count) for count in bins], fontsize=7)
        axis.set_xlabel("bins")
    save(drawn, out, "bins")


def draw_smoothing(results: dict[str, Any], out: Path) -> None:
    """Settled max violation by window, strength and rule, on three kinds of data."""
    drawn, axes = figure(columns=3, width=8.5, height=3.2)
    for axis, (world, rows) in zip(axes[0], results["rows"].items(), strict=True):
        names = list(rows)
        values = [rows[name]["max_violation"] for name in names]
        colours = [COLOURS["sign" if name.startswith("sign") else "quantile"] for name in names]
        axis.barh(range(len(names)), values, color=colours, height=0.65)
        for i, value in enumerate(values):
            axis.annotate(f" {value:.2f}", (value, i), va="center", fontsize=7)
        axis.set_yticks(range(len(names)), names if axis is axes[0][0] else [""] * len(names))
        axis.axvline(results["floor"], color="black", lw=0.6, ls="--")
        axis.invert_yaxis()
        axis.set_xlim(0, 1.2 * max(values))
        axis.set_title(world, fontsize=9)
        axis.set_xlabel("max violation")
    save(drawn, out, "smoothing")


def draw_clusters(results: dict[str, Any], out: Path) -> None:
    """Few clusters of tokens, and ever smaller micro-batches."""
    drawn, axes = figure(columns=2, height=2.8)
    for spread, style in (("0.0", "o-"), ("0.3", "s--")):
        rows = {int(name.split()[0]): row for name, row in results["rows"].items() if name.endswith(spread)}
        label = "copies" if spread == "0.0" else f"spread {spread}"
        axes[0][0].plot(
            list(rows), [row["max_violation"] for row in rows.values()], style, ms=3, label=label,
            color=COLOURS["quantile"],
        )  # fmt: skip
    axes[0][0].set_xlabel("clusters of tokens, Zipf frequencies")
    for name, rows in results["micro_batches"].items():
        rule = "quantile" if name.startswith("histogram") else "quantile_exact"
        axes[0][1].plot(
            [int(size) for size in rows], [row["max_violation"] for row in rows.values()], "o-", ms=3,
            label=name, color=COLOURS[rule],
        )  # fmt: skip
    axes[0][1].set_xlabel("tokens in a micro-batch")
    for axis in axes[0]:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.axhline(results["floor"], color="black", lw=0.6, ls="--")
        axis.legend(frameon=False)
    axes[0][0].set_ylabel("max violation")
    save(drawn, out, "clusters")


def draw_training(results: dict[str, Any], out: Path, name: str) -> None:
    """Max violation over steps of real training runs: mean over seeds, and their spread."""
    drawn, axes = figure(height=3.2)
    axis = axes[0][0]
    for rule, seeds in results["runs"].items():
        columns = list(zip(*(run["max_violation"] for run in seeds.values()), strict=True))
        steps = range(1, len(columns) + 1)
        axis.plot(steps, [statistics.mean(c) for c in columns], color=colour(rule), label=rule, lw=1.4)
        axis.fill_between(
            steps, [min(c) for c in columns], [max(c) for c in columns], color=colour(rule), alpha=0.15, lw=0
        )
    axis.set_xlabel("step")
    axis.set_ylabel("max violation, worst layer")
    axis.set_ylim(bottom=0)
    drawn.legend(frameon=False, loc="outside right upper")
    save(drawn, out, name)


def table(results: dict[str, Any]) -> str:
    """A Markdown table of training runs: mean over seeds, and least and largest."""
    lines = [
        "| rule | seeds | held-out loss | max violation, last 10 steps | dead experts | median step, s |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for rule, seeds in results["runs"].items():
        runs = list(seeds.values())
        cells = [
            ", ".join(seeds),
            spread([run["heldout_loss"] for run in runs], 3),
            spread([statistics.mean(run["max_violation"][-10:]) for run in runs], 2),
            spread([statistics.mean(run["dead_experts"][-10:]) for run in runs], 1),
            spread([run["median_step_seconds"] for run in runs], 2),
        ]
        lines.append(f"| {rule} | {' | '.join(cells)} |")
    return "\n".join(lines)


def start_table(results: dict[str, Any]) -> str:
    """A Markdown table: max violation step by step, and the first step below 0.25."""
    lines = [
        "| rule | seed | 1 | 2 | 3 | 4 | 5 | 6 | first below 0.25 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, curves in results["max_violation"].items():
        for seed, curve in enumerate(curves, 1):
            below = next(step for step, value in enumerate(curve, 1) if value < 0.25)
            numbers = " | ".join(f"{value:.2f}" for value in curve[:6])
            lines.append(f"| {name} | {seed} | {numbers} | {below} |")
    return "\n".join(lines)


def smoothing_table(results: dict[str, Any]) -> str:
    """A Markdown table: settled max violation by setting and kind of data."""
    rows = results["rows"]
    lines = [f"| setting | {' | '.join(rows)} |", "|---|" + "---|" * len(rows)]
    for name in next(iter(rows.values())):
        lines.append(
            f"| {name} | {' | '.join(f'{row[name]["max_violation"]:.2f}' for row in rows.values())} |"
        )
    return "\n".join(lines)


def bins_table(results: dict[str, Any]) -> str:
    """A Markdown table: error of a bias and max violation by bins."""
    keys = {
        "exact_error": "largest error of a bias",
        "own_violation": "same batch",
        "max_violation": "next batch",
    }
    lines = [f"| bins | {' | '.join(results['rows'])} |", "|---|" + "---|" * len(results["rows"])]
    for key, title in keys.items():
        lines.append(f"| {title} | {' | '.join(f'{row[key]:.2g}' for row in results['rows'].values())} |")
    return "\n".join(lines)


def trainings(results: Path) -> dict[str, dict[str, Any]]:
    """What collect_balance.py wrote into ``results``, by file name."""
    files = (path for path in sorted(results.glob("*.json")) if path.name != SIMULATION)
    found = {path.stem: json.loads(path.read_text()) for path in files}
    return {name: content for name, content in found.items() if "experts" in content}


def tables(results: Path) -> dict[str, str]:
    """Every table of the page by its title, from the result files in ``results``."""
    found = {name: table(content) for name, content in trainings(results).items()}
    if (results / SIMULATION).exists():
        content = json.loads((results / SIMULATION).read_text())
        makers = {"start": start_table, "bins": bins_table, "smoothing": smoothing_table}
        found |= {name: make(content[name]) for name, make in makers.items() if name in content}
    return found


def spread(values: list[float], digits: int) -> str:
    """Mean, with least and largest in brackets."""
    return f"{statistics.mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main() -> None:
    """Draw whatever there are results of."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--out", type=Path, default=HERE / "figures")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    simulation = options.results / SIMULATION
    if simulation.exists():
        found = json.loads(simulation.read_text())
        drawings = {
            "start": draw_start,
            "bins": draw_bins,
            "smoothing": draw_smoothing,
            "clusters": draw_clusters,
        }
        for name, draw in drawings.items():
            if name in found:
                draw(found[name], options.out)
    for name, content in trainings(options.results).items():
        draw_training(content, options.out, name)
    for title, text in tables(options.results).items():
        print(f"\n{title}\n\n{text}")


if __name__ == "__main__":
    main()
