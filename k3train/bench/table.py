"""The tables that are made from a benchmark's file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from k3train.bench.items import ITEMS, OURS, PEERS, shape_words
from k3train.bench.record import MEASURED, Record, Row


def list_items(console: Console) -> None:
    """What there is to measure, against whom."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("item", "what", "peers"):
        table.add_column(heading, overflow="fold")
    for name, item in ITEMS.items():
        table.add_row(name, item.what, "\n".join(f"{peer}: {what}" for peer, what in item.peers.items()))
    console.print(table)
    console.print("k3train bench ITEM or all measures; sizes of an item: --shape, such as")
    for name, item in ITEMS.items():
        console.print(f"  {name} --shape {shape_words(item.on_gpu[0])}", highlight=False)


def print_record(record: Record, console: Console) -> None:
    """One table for every item and shape, after the machine and its ceilings."""
    machine = record.made.get("machine", {})
    names = ("torch", "triton", "ptxas", "cudnn", *PEERS.values())
    versions = ", ".join(f"{name} {machine[name]}" for name in names if machine.get(name))
    line = f"{machine.get('device', '?')}, {record.made.get('date', '?')}: {versions}"
    console.print(line, highlight=False)
    if record.ceilings:
        copy, product = record.ceilings["copy_gb_s"], record.ceilings["matmul_tflop_s"]
        console.print(
            f"ceilings of this run: copy {copy:,.0f} GB/s, matrix product {product:,.2f} TFLOP/s",
            highlight=False,
        )
    for (item, shape), rows in _groups(record.rows):
        console.print(_table(item, shape, rows, record))


def _groups(rows: Iterable[Row]) -> list[tuple[tuple[str, str], list[Row]]]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.item, shape_words(row.shape)), []).append(row)
    order = list(ITEMS)
    return sorted(found.items(), key=lambda pair: order.index(pair[0][0]) if pair[0][0] in order else 99)


def _table(item: str, shape: str, rows: list[Row], record: Record) -> Table:
    dtype = next((row.dtype for row in rows if row.dtype), "")
    routing = next((f", routing {row.routing}" for row in rows if row.routing), "")
    if not routing and item in ITEMS and ITEMS[item].routed:
        routing = ", nothing routed"
    tokens = item == "model"
    table = Table(title=f"{item} {shape} {dtype}{routing}", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("by", overflow="fold")
    table.add_column("what", overflow="fold")
    for heading in ("ms", "quartiles", "x floor", "TFLOP/s", "GB/s", "GiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    if tokens:
        table.add_column("tokens/s", justify="right", no_wrap=True)
    table.add_column("note", overflow="fold")
    for row in sorted(rows, key=lambda row: (row.what != "forward", row.what != "forward + backward")):
        cells = _cells(row, record)
        if tokens:
            cells.insert(-1, f"{1e3 * row.shape['tokens'] * row.shape['documents'] / row.ms:,.0f}"
                         if row.ms else "")  # fmt: skip
        table.add_row(*cells)
    return table


def _cells(row: Row, record: Record) -> list[str]:
    who = _name(row.by, record)
    if row.status != MEASURED or row.ms is None:
        return [who, row.what, row.status, "", "", "", "", "", row.reason]

    def number(value: float | None) -> str:
        return "" if value is None else format(value, ",.3g" if value < 100 else ",.0f")

    return [
        who,
        row.what,
        f"{row.ms:.3f}",
        f"{row.low:.3f} to {row.high:.3f}",
        "" if row.ratio is None else f"{row.ratio:.2f}",
        number(row.tflop_s),
        number(row.gb_s),
        "" if row.peak_gib is None else f"{row.peak_gib:.2f}",
        row.note,
    ]


def _name(by: str, record: Record) -> str:
    if by == OURS:
        return by
    package = PEERS.get(by, by)
    number = record.made.get("machine", {}).get(package)
    return f"{package} {number}" if number else package


def print_comparison(before: Record, after: Record, console: Console) -> None:
    """Rows that both files have measured, and by how much they differ; others are counted."""
    old, new = _measured(before), _measured(after)
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("item", "shape", "by", "what"):
        table.add_column(heading, overflow="fold")
    for heading in ("A ms", "B ms", "B / A", "A GiB", "B GiB", "beyond quartiles"):
        table.add_column(heading, justify="right")
    for key in common(before, after):
        table.add_row(*_difference(old[key], new[key]))
    for letter, record in (("A", before), ("B", after)):
        machine = record.made.get("machine", {})
        console.print(f"{letter}: {machine.get('device', '?')}, {record.made.get('date', '?')}")
    console.print(table)
    lone = [f"{len([k for k in one if k not in other])} only in {name}" for name, one, other in
            (("A", old, new), ("B", new, old))]  # fmt: skip
    console.print(", ".join(lone), highlight=False)


def common(before: Record, after: Record) -> list[tuple[Any, ...]]:
    """Keys of the rows that both files have measured."""
    new = _measured(after)
    return [key for key in _measured(before) if key in new]


def _measured(record: Record) -> dict[tuple[Any, ...], Row]:
    return {_key(row): row for row in record.rows if row.status == MEASURED}


def _difference(a: Row, b: Row) -> list[str]:
    assert a.ms is not None
    assert b.ms is not None
    apart = (b.low or 0) > (a.high or 0) or (b.high or 0) < (a.low or 0)
    memory = [f"{x.peak_gib:.2f}" if x.peak_gib else "" for x in (a, b)]
    times = [f"{a.ms:.3f}", f"{b.ms:.3f}", f"{b.ms / a.ms:.3f}"]
    return [a.item, shape_words(a.shape), a.by, a.what, *times, *memory, "yes" if apart else "no"]


def _key(row: Row) -> tuple[Any, ...]:
    return row.item, tuple(sorted(row.shape.items())), row.by, row.what, row.dtype


def print_audit(audit: dict[str, Any], console: Console) -> None:
    """The numeric audit of KDA."""
    shape = shape_words(audit["shape"])
    console.print(
        f"KDA audit, {shape}: gate bound {audit['bound']:g}, tiles of {audit['tile']} tokens", highlight=False
    )
    table = Table(title="factors in a tile, and its scores from such operands", title_justify="left")
    table.box = box.SIMPLE_HEAD
    for heading in ("regime", "exponents, log2", "bf16 overflow", "error", "fp16 overflow", "error"):
        table.add_column(heading, justify="left" if heading == "regime" else "right")
    for row in audit["operands"]:
        cells = [f"{row['log2'][0]:.0f} to {row['log2'][1]:.0f}"]
        for name in ("bfloat16", "float16"):
            error = row[name]["error"]
            cells += [
                f"{100 * row[name]['overflowed']:.1f} %", "not finite" if error is None else f"{error:.1e}"
            ]  # fmt: skip
        table.add_row(row["regime"], *cells)
    console.print(table)
    names = list(audit["errors"][0]["errors"])
    seeds = audit.get("seeds", 1)
    title = f"errors relative to float64, by dtype of the inputs; root mean squares of {seeds} draws"
    table = Table(title=title, title_justify="left")
    table.box = box.SIMPLE_HEAD
    for heading in ("regime", "path", "inputs"):
        table.add_column(heading)
    for heading in names:
        table.add_column(heading, justify="right")
    for row in audit["errors"]:
        ends = [f"{row['errors'][name]:.1e}" for name in names]
        table.add_row(row["regime"], row["path"], row["dtype"], *ends)
    console.print(table)
    for name, reason in audit["not_run"].items():
        console.print(f"not run: {name}: {reason}", highlight=False)
    for name, fits in audit["largest_tile"].items():
        verdict = audit["verdict"][name]
        word = "yes" if verdict["yes"] else "no"
        console.print(
            f"{name}: {word}: {verdict['reason']}; at this bound a tile may have {fits} tokens",
            highlight=False,
        )
