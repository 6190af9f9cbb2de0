"""Launches of the sequential part of KDA: chains, the maps of segments and the scans that join them.

``x`` are the operands of all chunks by name, see ``triton_prep``; states are fp32 [slots, h, d, d].
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from k3train.kernels.kda.chunked import StateExchange
from k3train.kernels.kda.segments import CHUNK, Tables

SCAN_VALUES = 32
"""Value channels of a scan's program."""
STAGES = {("states", 128): 3, ("states", 64): 3, ("maps", 128): 4, ("maps", 64): 2}
"""Chunks of operands in shared memory, by kind of chain and value channels of a program."""


@lru_cache
def _layout(columns: int) -> Any:
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * columns), element_bitwidth=16, rank=2)


def descriptor(x: Tensor, rows: int, columns: int) -> Any:
    """A matrix whose last axis is x's, copied in blocks of rows x columns by the bulk copy engine."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    width = x.shape[-1]
    shape, block = [x.numel() // width, width], [rows, columns]
    return TensorDescriptor(x, shape, [width, 1], block, _layout(columns))


def _operands(x: dict[str, Tensor]) -> list[Any]:
    wide = [descriptor(x[name], CHUNK, x[name].shape[-1]) for name in ("kh", "kt", "qh")]
    return [*wide, *(descriptor(x[name], CHUNK, CHUNK) for name in ("tb", "aqk"))]


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **settings: Any) -> None:
    """Start a Triton or Gluon kernel, whose type says nothing of that."""
    kernel[grid](*arguments, **settings)


def chain(
    x: dict[str, Tensor],
    v: Tensor,
    table: Tables,
    kind: str,
    entering: Tensor | None,
    leaving: Tensor | None,
    *,
    o: Tensor | None = None,
    hs: Tensor | None = None,
    us: Tensor | None = None,
) -> None:
    """Run the chains of ``table`` from left to right.

    ``kind`` says what they write: "output" (o, and leaving if given), "states" (hs, us) or "maps" (leaving).
    """
    from k3train.kernels.kda.triton_chain import kda_states
    from k3train.kernels.kda.triton_output import kda_output

    rows = table.rows["maps" if kind == "maps" else "main"]
    h, d = v.shape[1:]
    block = table.blocks[kind]
    grid = (d // block, h, len(rows))
    shapes = {"H": h, "D": d, "V": d, "BV": block, "num_warps": block // 16}
    shapes["HAS_H0"] = entering is not None
    values, operands = descriptor(v.view(-1, h * d), CHUNK, block), _operands(x)
    if kind == "output":
        states = (x["dec"], o, entering, leaving, rows)
        launch(kda_output, grid, values, *operands, *states, STORE_HT=leaving is not None, STAGES=2, **shapes)
        return
    kh, kt, _, tb, _ = operands
    stores = [None if y is None else descriptor(y, r, block) for y, r in ((hs, d), (us, CHUNK))]
    states = (*stores, x["dec"], entering, leaving, rows)
    shapes |= {"MAP": kind == "maps", "STAGES": STAGES[kind, block]}
    launch(kda_states, grid, values, kh, kt, tb, *states, **shapes)


def chain_back(
    x: dict[str, Tensor],
    do: Tensor,
    table: Tables,
    kind: str,
    entering: Tensor | None,
    leaving: Tensor | None,
    *,
    dhs: Tensor | None = None,
    dv: Tensor | None = None,
) -> None:
    """Run ``kda_bchain``: gradients enter a segment at its end and leave at its start.

    ``kind`` "back" writes dhs and dv, "back maps" only what leaves.
    """
    from k3train.kernels.kda.triton_chain import kda_bchain

    rows = table.rows["maps" if kind == "back maps" else "main"]
    h, d = do.shape[1:]
    block = table.blocks[kind]
    warps = 8 if block == 128 else 4
    launch(
        kda_bchain, (d // block, h, len(rows)),
        descriptor(do.view(-1, h * d), CHUNK, block), *_operands(x),
        None if dhs is None else descriptor(dhs, d, block), x["dec"], dv, entering, leaving, rows, H=h, D=d,
        V=d, BV=block, HAS_DHT=entering is not None, STORE_DH0=leaving is not None, MAP=kind == "back maps",
        STAGES=2, W=warps, num_warps=warps,
    )  # fmt: skip


def _scan(
    table: Tables,
    name: str,
    written: Tensor | None,
    transition: Tensor | None,
    *,
    start: Tensor | None = None,
    states: Tensor | None = None,
    end: Tensor | None = None,
    transposed: bool = False,
) -> None:
    """Run ``kda_scan`` over the chains of the plan's scan ``name``; absent tensors are not touched."""
    from k3train.kernels.kda.triton_scan import kda_scan

    chains = table.rows[name]
    some = next(y for y in (states, end) if y is not None)
    h, d = some.shape[1:3]
    tensors = (some if y is None else y for y in (start, written, transition, states, end))
    launch(
        kda_scan, (d // SCAN_VALUES, h, len(chains)),
        chains, table.rows[f"{name} steps"], *tensors, H=h, D=d, BV=SCAN_VALUES, TRANSPOSED=transposed,
        HAS_START=start is not None, num_warps=8,
    )  # fmt: skip


def _shard_map(
    table: Tables, written: Tensor | None, transition: Tensor | None, out: Tensor, *, transposed: bool
) -> Tensor:
    """What the shard's segments together write into its outer states ``out`` [documents, h, d, d], zeros."""
    if table.plan.shard.chains:
        _scan(table, "shard", written, transition, end=out, transposed=transposed)
    return out


def states_entering(
    x: dict[str, Tensor],
    v: Tensor,
    initial: Tensor | None,
    table: Tables,
    exchange: StateExchange | None,
    documents: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """States that enter the segments, the segments' transitions, and the shard's [documents, h, d, d].

    v [tokens, h, d]. ``initial`` [documents, h, d, d] are the documents' own states; with ``exchange`` they
    come from there, for the ``documents`` that shards share.
    """
    plan, (h, d) = table.plan, v.shape[1:]
    maps = x["dec"].new_empty(plan.written, h, d, d) if plan.maps else None
    if maps is not None:
        chain(x, v, table, "maps", initial, maps)
    whole = None
    if exchange is not None:
        written = _shard_map(table, maps, maps, x["dec"].new_zeros(documents, h, d, d), transposed=False)
        if plan.transition.chains:
            whole = torch.empty_like(written)
            _scan(table, "transition", None, maps, end=whole)
        flat = None if whole is None else whole.flatten(0, 1)
        initial = exchange.entering(flat, written.flatten(0, 1)).view_as(written)
    entering = initial
    if plan.states:
        entering = x["dec"].new_empty(plan.states, h, d, d)
        _scan(table, "enter", maps, maps, start=initial, states=entering)
    elif exchange is not None:
        entering = None
    transitions = maps[: table.transitions].clone() if maps is not None and table.transitions else None
    return entering, transitions, whole


def gradients_leaving(
    x: dict[str, Tensor],
    do: Tensor,
    final: Tensor | None,
    transitions: Tensor | None,
    whole: Tensor | None,
    table: Tables,
    exchange: StateExchange | None,
    documents: int,
) -> Tensor | None:
    """Gradients of the states that leave the segments; ``final`` [documents, h, d, d] of the documents' own.

    The mirror image of ``states_entering``, whose results ``transitions`` and ``whole`` are.
    """
    plan, (h, d) = table.plan, do.shape[1:]
    sent = x["dec"].new_empty(plan.written, h, d, d) if plan.maps else None
    if sent is not None:
        chain_back(x, do, table, "back maps", final, sent)
    if exchange is not None:
        zeros = x["dec"].new_zeros(documents, h, d, d)
        written = _shard_map(table, sent, transitions, zeros, transposed=True)
        flat = None if whole is None else whole.flatten(0, 1)
        final = exchange.leaving(flat, written.flatten(0, 1)).view_as(written)
    leaving = final
    if plan.states:
        leaving = x["dec"].new_empty(plan.states, h, d, d)
        _scan(table, "enter", sent, transitions, start=final, states=leaving, transposed=True)
    elif exchange is not None:
        leaving = None
    return leaving
