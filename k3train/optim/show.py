"""Which rule each parameter gets and what the optimizer keeps of it, as a table. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from rich.console import Console

from k3train.config.schema import Offload, Optimizer, Precision, Run
from k3train.optim.decay import is_decayed
from k3train.optim.memory import state_bytes
from k3train.optim.rules import Assignment, Rule, assignments


def print_rules(run: Run, console: Console) -> None:
    """One line for all parameters that differ only in their layer, then what the optimizer keeps in all.

    Raises ConfigError as ``assignments`` does.
    """
    found = assignments(run.model, run.optim)
    bf16 = run.model.precision is Precision.bf16
    lines: dict[tuple[str, ...], int] = {}
    for name, assigned in found.items():
        line = (
            re.sub(r"^layers\.\d+\.", "layers.*.", name),
            " x ".join(str(size) for size in assigned.parameter.shape),
            _rule(assigned),
            f"{run.optim.weight_decay:g}" if is_decayed(name, assigned.parameter) else "-",
            "fp32" if assigned.parameter.fp32 or not bf16 else "bf16",
        )
        lines[line] = lines.get(line, 0) + 1
    titles = ("parameters", "shape", "rule", "decay", "dtype")
    rows = [(*titles, "tensors"), *((*line, f"{count:,}") for line, count in lines.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        console.print("  ".join(cells).rstrip(), soft_wrap=True, highlight=False)
    _print_settings(run, found.values(), console)


def _rule(assigned: Assignment) -> str:
    rule, shape = assigned.rule, assigned.parameter.shape
    if rule is Rule.heads:
        heads = shape[0] // sum(assigned.blocks)
        each = " and ".join(f"{rows} x {shape[1]}" for rows in assigned.blocks)
        return f"{rule.value}: {heads} times {each}"
    return f"{rule.value}: {shape[0]} times {shape[1]} x {shape[2]}" if rule is Rule.experts else rule.value


def _print_settings(run: Run, found: Iterable[Assignment], console: Console) -> None:
    optim, bf16 = run.optim, run.model.precision is Precision.bf16
    on_host = optim.offload is Offload.cpu
    numbers = {True: 0, False: 0}
    kept = 0
    for assigned in found:
        numbers[assigned.rule is Rule.adamw] += math.prod(assigned.parameter.shape)
        kept += state_bytes(assigned, bf16=bf16, on_host=on_host)
    lines = [
        f"AdamW: {numbers[True]:,} parameters, betas {optim.beta1:g} and {optim.beta2:g}, eps {optim.eps:g}"
        f"{', on the host' if on_host else ''}"
    ]
    if optim.optimizer is Optimizer.muon:
        muon = optim.muon
        how = "Nesterov momentum" if muon.nesterov else "momentum"
        lines.append(
            f"Muon: {numbers[False]:,} parameters, {how} {muon.momentum:g}, {muon.newton_schulz_steps} "
            f"{muon.newton_schulz.value} Newton-Schulz steps in {muon.precision.value}, "
            f"update {muon.update_scale:g} * sqrt(max(rows, columns))"
        )
    clip = optim.qk_clip
    lines.append(f"QK-Clip: {f'logits to {clip.threshold:g}' if clip.enabled else 'off'}")
    lines.append(f"optimizer state: {kept / 2**30:,.3f} GiB over all ranks{', on hosts' if on_host else ''}")
    console.print("\n".join(lines), soft_wrap=True, highlight=False)
