"""The balance of a run after the fact: its layers' numbers, and its saved histograms with other bins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from k3train.config.problems import BadInput
from k3train.config.schema import Quantile
from k3train.monitor.balance_file import FOLDER, Saved, read_saved
from k3train.monitor.metrics_file import METRICS, read_records
from k3train.monitor.record import BalanceRecord
from k3train.router.quantile import QuantileBalance

SHOWN = ("max_violation", "load_cv", "dead_experts", "causal_lag", "bias_range", "bias_drift")


def print_balance(run_dir: Path, console: Console, *, last: int, bins: int | None) -> None:
    """Print each layer's mean over the ``last`` recorded steps, and what the saved histograms give.

    With ``bins``, histograms are merged to so many bins, and it is printed how far the bias moves by that.
    Raises BadInput when there is no such run, when it has no record of its balance, or no histogram that
    ``bins`` divides.
    """
    path = run_dir / METRICS
    if not path.is_file() or not path.stat().st_size:
        what = "is empty" if path.is_file() else "does not exist"
        raise BadInput(f"{path} {what}: give the directory of a run that has trained")
    records = layer_records(path)
    if not records:
        raise BadInput(f"{run_dir} has no record of balance by layer: set monitor.balance.layers_every_steps")
    kept = [records[step] for step in sorted(records)][-last:]
    console.print(_layer_table(kept))
    saved = list(read_saved(run_dir))
    if saved:
        console.print(_histogram_table(saved, bins))
    elif bins is not None:
        raise BadInput(f"{run_dir / FOLDER} has no histograms: set monitor.balance.save_every_steps")


def layer_records(path: Path) -> dict[int, dict[str, Any]]:
    """The latest attempt's record of each step that has one."""
    return {each["step"]: each for each in read_records(path) if each["kind"] == BalanceRecord.kind}


def merged_bias(saved: Saved, layer: int, bins: int) -> torch.Tensor:
    """Next bias of the layer at index ``layer``, fp32 [experts], from its histogram merged to ``bins``."""
    whole = torch.from_numpy(saved.statistics[layer])
    if bins < 1 or whole.shape[1] % bins:
        raise BadInput(f"--bins {bins} does not divide the {whole.shape[1]} bins that the run saved")
    rule = QuantileBalance(len(whole), saved.top_k, Quantile(bins=bins))
    return rule.next_bias(
        torch.from_numpy(saved.bias[layer]),
        torch.from_numpy(saved.bounds[layer]),
        torch.from_numpy(saved.loads[layer]),
        whole.view(len(whole), bins, -1).sum(-1),
    )


def _layer_table(records: list[dict[str, Any]]) -> Table:
    first, last = records[0]["step"], records[-1]["step"]
    table = Table("layer", *SHOWN, title=f"mean of {len(records)} recorded steps, {first} to {last}")
    for index, layer in enumerate(records[-1]["layers"]):
        values = [sum(each["values"][name][index] for each in records) / len(records) for name in SHOWN]
        table.add_row(str(layer), *(f"{value:.3f}" for value in values))
    return table


def _histogram_table(saved: list[tuple[int, Saved]], bins: int | None) -> Table:
    table = Table("step", "layer", "max_violation", "bias_range", title="saved histograms, replayed")
    if bins is not None:
        table.add_column(f"bias with {bins} bins")
    for step, each in saved:
        if each.statistics.shape[-1] < 2:
            raise BadInput(f"step {step} was saved by a rule without a histogram")
        for index, layer in enumerate(each.layers):
            mean = each.loads[index].mean()
            bias = merged_bias(each, index, each.statistics.shape[-1])
            row = [str(step), str(layer), f"{each.loads[index].max() / max(mean, 1) - 1:.3f}"]
            row.append(f"{float(bias.max() - bias.min()):.4f}")
            if bins is not None:
                row.append(f"differs by {float((merged_bias(each, index, bins) - bias).abs().max()):.5f}")
            table.add_row(*row)
    return table
