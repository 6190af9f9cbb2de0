"""What a run comes to, as tables: its stages with their layouts, and its parameters."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from k3train.config.merge import world_size
from k3train.config.schema import Run
from k3train.curriculum.stages import stage_table, total_tokens
from k3train.parallel.layout import Layout, make_layout
from k3train.plan.counts import count_parameters
from k3train.plan.recompute import recompute_plan
from k3train.plan.split import imbalance, resolved_parallel


def one_line(run: Run) -> str:
    """The run in one line: name, size, stages, tokens and ranks."""
    counts = count_parameters(run.model)
    table = stage_table(run)
    stages = f"{len(table)} stage{'s' if len(table) != 1 else ''}"
    size = f"{short(counts.total)} parameters, {short(counts.active)} active"
    return f"{run.name}: {size}, {stages}, {short(total_tokens(table))} tokens on {world_size(run)} ranks"


def print_stages(run: Run, console: Console) -> None:
    """One line a stage: context, tokens, steps, batch in tokens and in packed sequences (rows), layout.

    Passes are the micro-batches of one data-parallel rank in one step.
    """
    table = Table(title="stages", title_justify="left", box=None, pad_edge=False)
    table.add_column("stage", no_wrap=True)
    for name in ("context", "tokens", "steps", "batch", "rows", "passes"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("layout", no_wrap=True)
    for plan in stage_table(run):
        stage = plan.stage
        layout = make_layout(run.model, resolved_parallel(run, stage), world_size(run))
        table.add_row(
            plan.name,
            f"{stage.context_tokens:,}",
            short(stage.tokens),
            f"{plan.steps:,}",
            short(stage.batch_tokens),
            f"{plan.sequences_per_step:,}",
            f"{plan.sequences_per_step // (layout.dp * stage.micro_batch_sequences):,}",
            describe(layout),
        )
    console.print(table)


def print_splits(run: Run, console: Console) -> None:
    """Decoder layers of each pipeline chunk in each stage that has several, and the work's imbalance.

    Imbalance is the most expensive chunk over the mean, in FLOPs at the stage's context.
    """
    for plan in stage_table(run):
        parallel = resolved_parallel(run, plan.stage)
        if parallel.pipeline_split and len(parallel.pipeline_split) > 1:
            factor = imbalance(
                run.model, parallel.pipeline_split, plan.stage.context_tokens, recompute_plan(parallel)
            )
            split = " ".join(str(layers) for layers in parallel.pipeline_split)
            console.print(f"pipeline {plan.name}: {split} layers, imbalance {factor:.3f}", soft_wrap=True)


def print_parameters(run: Run, console: Console) -> None:
    """Parameters of each component, in total and used by one token."""
    counts = count_parameters(run.model)
    table = Table(title="parameters", title_justify="left", box=None, pad_edge=False)
    table.add_column("component")
    table.add_column("total", justify="right")
    table.add_column("active per token", justify="right")
    for name, part in counts.components.items():
        if part.total:
            table.add_row(name, f"{part.total:,}", f"{part.active:,}")
    table.add_row("all", f"{counts.total:,}", f"{counts.active:,}", style="bold")
    console.print(table)


def describe(layout: Layout) -> str:
    """Degrees above 1 and the data-parallel degree, such as ``pp8x3 tp2 ep32 dp256``."""
    degrees = {name: getattr(layout, name) for name in ("tp", "cp", "ep", "etp")}
    parts = [f"{name}{degree}" for name, degree in degrees.items() if degree > 1]
    if layout.pp > 1:
        parts.insert(0, f"pp{layout.pp}x{layout.vp}")
    return " ".join([*parts, f"dp{layout.dp}"])


def short(number: float) -> str:
    """Three significant digits and K, M, B, T, P or E."""
    for power, unit in ((18, "E"), (15, "P"), (12, "T"), (9, "B"), (6, "M"), (3, "K")):
        if number >= 10**power:
            return f"{number / 10**power:.3g} {unit}"
    return f"{number:.3g}"
