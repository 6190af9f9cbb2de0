"""What a run has reached, from the files in its folder: each stage's losses and where its files lie.

python launch/summary.py runs/debug                  a table
python launch/summary.py experiment=debug            the same; settings only lead to the folder
python launch/summary.py experiment=debug --state    new, interrupted or finished, and the folder
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from k3train.checkpoint.listing import committed, complete, last_trained
from k3train.config.compare import tokens_of
from k3train.config.compose import compose, load_resolved
from k3train.config.problems import REFUSALS, BadInput, refusal
from k3train.config.schema import Run
from k3train.config.trained import CHECKPOINTS
from k3train.curriculum.stages import StagePlan, stage_table, total_tokens
from k3train.monitor.metrics_file import METRICS, read_records

SETTINGS = "run.yaml"
NEEDED = {
    "step": {"step": int, "stage": str, "step_seconds": float},
    "eval": {"step": int, "tokens": int, "heldout": str, "context_tokens": int, "loss": float},
}
"""What a record must hold to be counted, by its kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSummary:
    """One stage as far as it has come. A pair is (at its start, at its latest point), None until known."""

    plan: StagePlan
    steps: int
    """Steps done."""
    heldout: dict[str, tuple[float | None, float | None]]
    """Loss of each held-out set at the stage's context length, in nats per predicted token."""
    tokens_per_second: float | None
    """Over the stage's steps, pauses for evaluation and checkpoints left out."""


def read(path: Path) -> list[dict[str, Any]]:
    """Records of metrics.jsonl, those of steps that were trained twice only once: as trained last.

    One that is not whole is passed over with a warning. Raises BadInput when there is no record, OSError when
    the file cannot be read.
    """
    if not path.exists():
        raise BadInput(f"{path} is not there: nothing has been trained, or the file was moved; put it back")
    same = ("kind", "step", "event", "heldout", "context_tokens")
    records = read_records(path, NEEDED)
    latest = {tuple(str(record.get(key)) for key in same): record for record in records}
    if not latest:
        raise BadInput(f"{path} holds no record: nothing has been trained, or the file is damaged")
    return list(latest.values())


def summarise(run: Run, records: Iterable[dict[str, Any]]) -> list[StageSummary]:
    """Summary of every stage of ``run``, from its records."""
    records = list(records)
    evaluations = [record for record in records if record.get("kind") == "eval"]
    steps = [record for record in records if record.get("kind") == "step"]
    return [
        StageSummary(
            plan=plan,
            steps=sum(record["stage"] == plan.name for record in steps),
            heldout={name: _first_and_last(plan, name, evaluations) for name in run.data.heldout},
            tokens_per_second=_speed(plan, steps),
        )
        for plan in stage_table(run)
    ]


def _first_and_last(
    plan: StagePlan, heldout: str, evaluations: list[dict[str, Any]]
) -> tuple[float | None, float | None]:
    """Loss where the stage began (evaluated one stage ahead) or soon after, and its latest loss."""
    here = sorted(
        (record["tokens"], record["loss"])
        for record in evaluations
        if record["heldout"] == heldout
        and record["context_tokens"] == plan.stage.context_tokens
        and record["tokens"] <= plan.end_tokens
    )
    before = [loss for tokens, loss in here if tokens <= plan.start_tokens]
    within = [loss for tokens, loss in here if tokens > plan.start_tokens]
    first = before[-1] if before else within[0] if len(within) > 1 else None
    return first, within[-1] if within else None


def _speed(plan: StagePlan, steps: list[dict[str, Any]]) -> float | None:
    seconds = sum(record["step_seconds"] for record in steps if record["stage"] == plan.name)
    tokens = sum(plan.stage.batch_tokens for record in steps if record["stage"] == plan.name)
    return tokens / seconds if seconds > 0 else None


def folder_of(words: list[str], config_dir: str | None) -> Path:
    """The run's folder: named itself, or by the settings that the run was started with."""
    if len(words) == 1 and "=" not in words[0]:
        return Path(words[0])
    return Path(compose(words, config_dir).dir)


def load(folder: Path) -> Run:
    """The run in this folder as it was started last. Raises BadInput when there is none."""
    file = folder / SETTINGS
    if not file.exists():
        raise BadInput(f"{folder} holds no run: {file} is not there; give the folder of a run")
    return replace(load_resolved(file), dir=str(folder))


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of the run in this folder, oldest first."""
    return [path for _, path, _ in complete(folder / CHECKPOINTS)][::-1]


def state(run: Run) -> str:
    """``new`` without a checkpoint, ``finished`` when it has trained all tokens, else ``interrupted``.

    Raises BadInput when there are checkpoints and none can be used."""
    trained = last_trained(Path(run.dir))
    if not trained.steps:
        return "new"
    return "finished" if tokens_of(trained, run) >= total_tokens(stage_table(run)) else "interrupted"


def print_summary(run: Run, console: Console) -> None:
    """Print the table of stages and the run's files. Raises what ``read`` and ``state`` do."""
    stages = summarise(run, read(Path(run.dir) / METRICS))
    table = Table(title=f"{run.name}: {state(run)}", title_justify="left")
    for heading in ("stage", "context", "steps", "held-out", "loss: start", "end", "tokens/s"):
        table.add_column(heading, justify="left" if heading in ("stage", "held-out") else "right")
    for stage in stages:
        speed = "" if stage.tokens_per_second is None else f"{stage.tokens_per_second:,.0f}"
        context, steps = f"{stage.plan.stage.context_tokens:,}", f"{stage.steps}/{stage.plan.steps}"
        cells = [stage.plan.name, context, steps]
        for heldout, losses in stage.heldout.items():
            shown = ("" if loss is None else f"{loss:.3f}" for loss in losses)
            table.add_row(*cells, heldout, *shown, speed)
            cells, speed = ["", "", ""], ""
    console.print(table)
    for path in checkpoints(Path(run.dir)):
        console.print(f"checkpoint  {path}", soft_wrap=True, highlight=False)
    console.print(f"metrics     {Path(run.dir) / METRICS}", soft_wrap=True, highlight=False)
    console.print(f"settings    {Path(run.dir) / SETTINGS}", soft_wrap=True, highlight=False)


def main(arguments: list[str]) -> int:
    """Find the run's folder, and print its summary or state. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="folder|key=value",
        help="the run's folder, or the settings it was started with",
    )
    parser.add_argument(
        "--state", action="store_true", help="print new, interrupted or finished, and the folder"
    )
    parser.add_argument("--config-dir", help="folder of the configuration")
    options = parser.parse_intermixed_args(arguments)
    try:
        folder = folder_of(options.words, options.config_dir)
        if options.state:
            print(state(load(folder)) if committed(folder / CHECKPOINTS) else "new", folder)
        else:
            print_summary(load(folder), Console())
    except REFUSALS as error:
        sentence, code = refusal(error)
        print(sentence, file=sys.stderr)
        return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
