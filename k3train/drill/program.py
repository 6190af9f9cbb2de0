"""``k3train drill``: plays the fault matrix, or many random kills, and prints one table."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from k3train.config.keys import closest_word
from k3train.config.problems import BadInput
from k3train.drill.apart import run_apart
from k3train.drill.bench import Bench
from k3train.drill.kills import Storm, storm
from k3train.drill.matrix import ROWS
from k3train.drill.row import Row, Seen
from k3train.train.signals import EXIT_UNEXPECTED

RESULTS = "drill.json"
"""File in the drill's folder with everything that the table shows."""


def chosen(names: str) -> list[Row]:
    """The rows with these names, separated by commas. Raises BadInput for an unknown one."""
    by_name = {row.name: row for row in ROWS}
    rows = []
    for name in names.split(","):
        if name not in by_name:
            near = closest_word(name, by_name)
            hint = f"did you mean {near}?" if near else f"there are {', '.join(by_name)}"
            what = f"--faults {name} is not a row" if name else "--faults names no row"
            raise BadInput(f"{what} of the drill; {hint}")
        rows.append(by_name[name])
    return rows


def drill(rows: Iterable[Row], *, kills: int, seed: int, folder: Path | None) -> int:
    """Play the rows, then ``kills`` random kills; returns 0 when everything was as expected, else 1.

    Runs are kept in ``folder``; without one they lie in a temporary folder, which stays only when something
    was not as expected. SIGINT and SIGTERM stop the drill, with 1.
    Raises BadInput when ``folder`` is not empty.
    """
    if folder is not None and folder.is_dir() and any(folder.iterdir()):
        raise BadInput(f"--dir {folder} holds files, and runs there would go on: take an empty folder")
    used = folder or Path(tempfile.mkdtemp(prefix="k3train-drill-"))
    keep = folder is not None
    try:
        code = run_apart(lambda: _drill(list(rows), kills, seed, used))
        keep |= code != 0
    except KeyboardInterrupt:
        print("interrupted: the drill has stopped, without a verdict", file=sys.stderr)
        code = EXIT_UNEXPECTED
    finally:
        if not keep:
            shutil.rmtree(used, ignore_errors=True)
    if code and keep:
        print(f"what the runs left is in {used}")
    return code


def _drill(rows: list[Row], kills: int, seed: int, folder: Path) -> int:
    console = Console(width=150)
    bench = Bench(folder=folder, seed=seed)
    played: list[tuple[Row, Seen, float]] = []
    for row in rows:
        began = time.monotonic()
        seen = _play(row, bench)
        played.append((row, seen, time.monotonic() - began))
        console.print(f"{row.name}: {'as expected' if seen.as_expected else 'NOT AS EXPECTED'}: {seen.words}")
        if not seen.as_expected:
            print(seen.details)
    if played:
        console.print(_matrix(played))
    result = storm(bench, kills) if kills else None
    if result:
        console.print(_storm(result))
        for text in result.failed:
            print(text)
    (folder / RESULTS).write_text(json.dumps(_as_json(played, result, seed), indent=1))
    good = all(seen.as_expected for _, seen, _ in played) and (result is None or result.as_expected)
    return 0 if good else 1


def _play(row: Row, bench: Bench) -> Seen:
    try:
        return row.play(bench)
    except Exception as error:  # the other rows are played all the same
        words = f"the drill itself failed: {error!r}"[:200]
        return Seen(as_expected=False, words=words, details=traceback.format_exc())


def _matrix(played: list[tuple[Row, Seen, float]]) -> Table:
    table = Table(title="fault matrix")
    for heading in ("#", "name", "fault", "expected", "seen"):
        table.add_column(heading, overflow="fold")
    for heading in ("detected after", "steps again", "took"):
        table.add_column(heading, justify="right")
    for row, seen, seconds in played:
        table.add_row(
            row.matrix,
            row.name,
            row.fault,
            row.expected,
            seen.words if seen.as_expected else f"[red]NOT AS EXPECTED[/red]: {seen.words}",
            "" if seen.detect_seconds is None else f"{seen.detect_seconds:.1f} s",
            "" if seen.lost_steps is None else str(seen.lost_steps),
            f"{seconds:.0f} s",
        )
    return table


def _storm(result: Storm) -> Table:
    table = Table(title="random kills")
    table.add_column("what")
    table.add_column("result", justify="right")
    rows: list[tuple[str, str]] = [
        ("kills / runs / starts", f"{result.total} / {result.runs} / {result.starts}"),
        *((f"  in {moment}", str(count)) for moment, count in sorted(result.kills.items())),
        ("  in runs that save beside training, of writers", f"{result.beside}, {result.writers}"),
        ("losses that differ from the golden run", str(result.mismatches)),
        ("checkpoints lost", f"{result.lost} (looked {result.looks:,} times)"),
        ("ranks left over", str(result.orphans)),
        ("runs that did not end well", str(len(result.failed))),
        ("most steps trained again after a kill", str(result.lost_steps)),
        (
            "time to detect, median / 95% / worst",
            " / ".join(f"{each:.2f} s" for each in _spread(result.detect)),
        ),
        ("time per kill, all included", f"{result.seconds / max(result.total, 1):.1f} s"),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _spread(values: list[float]) -> tuple[float, float, float]:
    """Median, 95th percentile and maximum, none beyond the values themselves."""
    if len(values) < 2:
        return (values or [0.0])[0], (values or [0.0])[0], (values or [0.0])[0]
    return statistics.median(values), statistics.quantiles(values, n=20, method="inclusive")[-1], max(values)


def _as_json(played: list[tuple[Row, Seen, float]], result: Storm | None, seed: int) -> dict[str, Any]:
    return {
        "seed": seed,
        "rows": [{"name": row.name, "seconds": seconds, **asdict(seen)} for row, seen, seconds in played],
        # asdict would make a Counter of a Counter's items
        "kills": {**asdict(result), "kills": dict(result.kills)} if result else None,
    }
