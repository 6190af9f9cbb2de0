"""The options of ``k3train drill``, checked before anything is imported that takes seconds."""

from __future__ import annotations

import argparse
from pathlib import Path


def drill(parser: argparse.ArgumentParser, arguments: list[str]) -> int:
    """Read the options and play the rows, the random kills, or both; returns the exit code."""
    parser.add_argument("--faults", metavar="A,B", help="only these rows of the fault matrix; default: all")
    parser.add_argument(
        "--kills",
        type=int,
        metavar="N",
        help="kill N random ranks at random moments, after the rows of --faults, none by default",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random kills")
    parser.add_argument("--dir", type=Path, help="keep the runs in this folder")
    parser.add_argument("--list", action="store_true", help="only list the rows")
    options = parser.parse_args(arguments)
    if options.kills is not None and options.kills < 1:
        parser.error(f"argument --kills: {options.kills} is no number of kills; use 1 or more")
    if options.seed < 0:
        parser.error(f"argument --seed: {options.seed} is negative; use 0 or more")
    from k3train.drill.matrix import ROWS
    from k3train.drill.program import chosen
    from k3train.drill.program import drill as play

    rows = chosen(options.faults) if options.faults is not None else () if options.kills else ROWS
    if options.list:
        for row in rows or ROWS:
            print(f"{row.name:20} {row.fault}")
        return 0
    return play(rows, kills=options.kills or 0, seed=options.seed, folder=options.dir)
