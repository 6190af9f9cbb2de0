"""The command line of ``k3train bench``, checked before anything is started."""

from __future__ import annotations

import argparse
import datetime
import math
import re
import shlex
from pathlib import Path

from rich.console import Console

from k3train.bench.items import PEERS, default_shapes, find, read_audited, read_shape
from k3train.bench.output import claimed
from k3train.bench.record import Record, own_trouble, read_record
from k3train.bench.table import common, list_items, print_audit, print_comparison, print_record
from k3train.config.keys import closest_word
from k3train.config.problems import BadInput, Unavailable
from k3train.config.ranges import RANGES
from k3train.config.terminal import table_console


def bench(parser: argparse.ArgumentParser, arguments: list[str]) -> int:
    """Do what ``arguments`` ask for; returns the exit code."""
    _add_options(parser)
    options = parser.parse_args(arguments)
    console = table_console()
    if options.what is None:
        list_items(console)
        return 0
    if options.what == "show":
        _refuse_options(parser, options)
        return _show(options.files, console)
    if options.files:
        raise BadInput(f"{options.files[0]}: several items are separated by commas, such as kda,situ")
    items = find(options.what)
    if options.audit and items != ["kda"]:
        raise BadInput(f"--audit is for kda, not for {options.what}; use k3train bench kda --audit")
    if options.gate_lower_bound is not None and not options.audit:
        raise BadInput("--gate-lower-bound belongs to --audit; measured are models' own bounds")
    for name in ("budget", "item_seconds"):
        if not 0 < getattr(options, name) < math.inf:
            value = getattr(options, name)
            raise BadInput(f"--{name.replace('_', '-')} {value:g} is no length of time; use more than 0")
    if options.settings < 0:
        raise BadInput(f"--settings {options.settings} is negative; use 0 (all) or more")
    return _run(items, options, arguments, console)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        metavar="ITEM",
        help="items separated by commas, all, or show; without any, they are listed",
    )
    parser.add_argument("files", nargs="*", help="of show: one file to print, or two to compare")
    parser.add_argument(
        "--shape", action="append", metavar="SIZE=N,...", help="instead of the item's own; may be repeated"
    )
    parser.add_argument(
        "--peers", default="auto", metavar="A,B", help=f"auto, none, or some of {', '.join(PEERS)}"
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="default: bench-DEVICE-DATE.json")
    parser.add_argument("--budget", type=float, default=900, metavar="SECONDS", help="in all (default 900)")
    parser.add_argument(
        "--item-seconds", type=float, default=180, metavar="SECONDS", help="for one process (default 180)"
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument(
        "--settings", type=int, default=8, metavar="N", help="an autotuned kernel tries (0: all; default 8)"
    )
    parser.add_argument("--audit", action="store_true", help="of kda: exponents and errors, instead of times")
    parser.add_argument("--gate-lower-bound", type=float, metavar="G", help="of --audit (default -5)")


def _refuse_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    for name, value in vars(options).items():
        if name not in ("what", "files") and value != parser.get_default(name):
            raise BadInput(
                f"--{name.replace('_', '-')} has no effect on show, which prints a file; leave it out"
            )


def _show(files: list[str], console: Console) -> int:
    if len(files) not in (1, 2):
        raise BadInput(f"show takes one file to print or two to compare, not {len(files)}")
    records = [read_record(Path(file)) for file in files]
    if len(records) == 2:
        if not common(*records):
            raise BadInput(
                f"{files[0]} and {files[1]} have no measured row in common; "
                "give two files of the same items and shapes, such as one before a change and one after"
            )
        print_comparison(records[0], records[1], console)
    else:
        _print(records[0], console)
    return 0


def _print(record: Record, console: Console) -> None:
    print_record(record, console)
    if record.audit is not None:
        print_audit(record.audit, console)


def _run(items: list[str], options: argparse.Namespace, arguments: list[str], console: Console) -> int:
    peers = _peers(options.peers)
    bound = _bound(options) if options.audit else None
    if options.shape and len(items) > 1:
        raise BadInput("--shape needs one item, such as k3train bench kda --shape tokens=4096")
    if options.device == "cpu" and options.shape:
        _shapes(items, options.shape, "cpu", audit=options.audit)  # before torch is imported
    device = _device(options.device)
    shapes = _shapes(items, options.shape, device, audit=options.audit)
    from k3train.bench.program import Request, run

    request = Request(
        shapes=shapes,
        peers=peers,
        device=device,
        budget_seconds=options.budget,
        item_seconds=options.item_seconds,
        settings=options.settings,
        command=shlex.join(["k3train", "bench", *arguments]),
        audit_bound=bound,
    )
    with claimed(options.out, f"bench-{_slug()}-{datetime.date.today().isoformat()}") as out:
        record = run(request, out)
    _print(record, console)
    print(f"written to {out}; k3train bench show {out} prints it again", flush=True)
    if record.audit is None and (trouble := own_trouble(record)):
        raise Unavailable(trouble)
    return 0


def _peers(text: str) -> list[str]:
    if text in ("auto", "none"):
        return list(PEERS) if text == "auto" else []
    for name in text.split(","):
        if name in ("auto", "none"):
            raise BadInput(f"--peers {text}: {name} stands alone; use --peers {name}, or name peers only")
        if name not in PEERS:
            near = closest_word(name, PEERS)
            hint = f"did you mean {near}?" if near else f"there are auto, none, {', '.join(PEERS)}"
            raise BadInput(f"--peers {name}: no such peer; {hint}")
    return [name for name in PEERS if name in text.split(",")]


def _bound(options: argparse.Namespace) -> float:
    bound = -5.0 if options.gate_lower_bound is None else options.gate_lower_bound
    largest = RANGES["model.kda.gate_lower_bound"].high
    if not -math.inf < bound <= largest:
        rule = f"use a number below 0, at most {largest:g}"
        raise BadInput(f"--gate-lower-bound {bound:g} is no bound of a log decay; {rule}")
    from k3train.bench.audit import refusal

    if refused := refusal(bound):
        raise BadInput(refused)
    return bound


def _device(asked: str) -> str:
    import torch

    has_gpu = torch.cuda.is_available()
    if asked == "cuda" and not has_gpu:
        raise Unavailable("--device cuda: torch sees no GPU; use --device cpu or run where nvidia-smi works")
    return "cuda" if has_gpu and asked != "cpu" else "cpu"


def _shapes(
    items: list[str], texts: list[str] | None, device: str, *, audit: bool
) -> dict[str, list[dict[str, int]]]:
    if audit:
        return {"kda": [read_audited(texts, device)]}
    if texts:
        return {items[0]: [read_shape(items[0], text, device) for text in texts]}
    return {item: [dict(shape) for shape in default_shapes(item, device)] for item in items}


def _slug() -> str:
    import torch

    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    return re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("nvidia ")).strip("-")
