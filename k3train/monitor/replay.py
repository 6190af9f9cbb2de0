"""The balance of a run after the fact: its layers' numbers, and its saved histograms with other bins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from k3train.config.compose import load_resolved
from k3train.config.nearest import choices, divisors
from k3train.config.problems import BadInput
from k3train.config.schema import Quantile
from k3train.monitor.balance_file import FOLDER, Saved, read_saved
from k3train.monitor.metrics_file import METRICS, read_records
from k3train.monitor.record import BalanceRecord
from k3train.router.metrics import AUDIT_COLUMNS, COLUMNS
from k3train.router.quantile import QuantileBalance


def print_balance(run_dir: Path, console: Console, *, last: int, bins: int | None) -> None:
    """Print each layer's mean over the ``last`` recorded steps, and what the saved histograms give.

    With ``bins``, histograms are merged to so many bins, and it is printed how far the bias moves by that.
    Raises BadInput when there is no such run, when it has no record of its balance or a damaged file, or no
    histogram that ``bins`` divides.
    """
    path = run_dir / METRICS
    if not path.is_file() or not path.stat().st_size:
        what = "is empty" if path.is_file() else "does not exist"
        raise BadInput(f"{path} {what}: give the directory of a run that has trained")
    records = layer_records(path)
    if not records and next(read_records(path), None) is None:
        raise BadInput(f"{path} holds no record: nothing has been trained, or the file is damaged")
    if not records:
        raise BadInput(f"{run_dir} has no record of balance by layer: {_why_none(run_dir)}")
    saved = list(read_saved(run_dir))
    if bins is not None and not any(_has_histogram(each) for _, each in saved):
        fix = (
            "only rule quantile has one"
            if saved
            else "they are saved while training, with monitor.balance.save_every_steps=50 for every 50th step"
        )
        raise BadInput(f"{run_dir / FOLDER} has no histogram for --bins {bins}: {fix}")
    kept = [records[step] for step in sorted(records)][-last:]
    console.print(_layer_table(kept, COLUMNS[1:], "recorded", 3))
    if audited := [each for each in kept if AUDIT_COLUMNS[0] in each["values"]]:
        console.print(_layer_table(audited, AUDIT_COLUMNS, "audited", 5))
    if saved:
        console.print(_histogram_table(saved, bins))


def _why_none(run_dir: Path) -> str:
    resolved = run_dir / "run.yaml"
    model = load_resolved(resolved).model if resolved.is_file() else None
    if model and model.num_dense_layers == model.num_layers and not model.mtp.num_layers:
        return f"none of its layers has experts (model.num_dense_layers = {model.num_dense_layers})"
    return "set monitor.balance.layers_every_steps"


def layer_records(path: Path) -> dict[int, dict[str, Any]]:
    """The latest attempt's record of each step that has one."""
    return {each["step"]: each for each in read_records(path) if each["kind"] == BalanceRecord.kind}


def merged_bias(saved: Saved, layer: int, bins: int) -> torch.Tensor:
    """Next bias of the layer at index ``layer``, fp32 [experts], from its histogram merged to ``bins``."""
    whole = torch.from_numpy(saved.statistics[layer])
    if bins < 1 or whole.shape[1] % bins:
        fitting = [each for each in divisors(whole.shape[1], bins, 3) if each > 1][-2:]
        raise BadInput(
            f"--bins {bins} does not divide the {whole.shape[1]} bins that the run saved: "
            f"use {choices(fitting)}"
        )
    rule = QuantileBalance(len(whole), saved.top_k, Quantile(bins=bins))
    return rule.next_bias(
        torch.from_numpy(saved.bias[layer]),
        torch.from_numpy(saved.bounds[layer]),
        torch.from_numpy(saved.loads[layer]),
        whole.view(len(whole), bins, -1).sum(-1),
    )


def _layer_table(records: list[dict[str, Any]], names: tuple[str, ...], what: str, digits: int) -> Table:
    first, last = records[0]["step"], records[-1]["step"]
    headers = [name.replace("_", " ") for name in names]  # words, which a narrow terminal can break
    table = Table("layer", *headers, title=f"mean of {len(records)} {what} steps, {first} to {last}")
    for index, layer in enumerate(records[-1]["layers"]):
        values = [sum(each["values"][name][index] for each in records) / len(records) for name in names]
        table.add_row(str(layer), *(f"{value:.{digits}f}" for value in values))
    return table


def _histogram_table(saved: list[tuple[int, Saved]], bins: int | None) -> Table:
    table = Table("step", "layer", "max_violation", "bias_range", title="saved steps, replayed")
    if bins is not None:
        table.add_column(f"bias with {bins} bins")
    for step, each in saved:
        for index, layer in enumerate(each.layers):
            mean = each.loads[index].mean()
            row = [str(step), str(layer), f"{each.loads[index].max() / max(mean, 1) - 1:.3f}"]
            table.add_row(*row, *_replayed(each, index, bins))
    return table


def _replayed(saved: Saved, layer: int, bins: int | None) -> list[str]:
    """Range of the bias that the histogram gives, and how far ``bins`` move it."""
    if not _has_histogram(saved):
        return ["no histogram"]
    bias = merged_bias(saved, layer, saved.statistics.shape[-1])
    found = [f"{float(bias.max() - bias.min()):.4f}"]
    if bins is not None:
        found.append(f"differs by {float((merged_bias(saved, layer, bins) - bias).abs().max()):.5f}")
    return found


def _has_histogram(saved: Saved) -> bool:
    return saved.statistics.shape[-1] > 1
