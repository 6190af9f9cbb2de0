"""How the documents of one buffer are cut into segments, and how states pass between them.

A chain of 64-token chunks is sequential. A long document is cut into segments that run side by side: first
every segment's own map of the state, S -> written + transition S, then a scan over the maps, which gives
every segment the state that enters it, then all segments at once. Gradients of the state go the same way
from right to left with the transposed transitions. A shard of a context-parallel group is one more level:
the maps of its segments are joined to the map of the shard.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from k3train.plan.pieces import KDA_CHUNK as CHUNK

PROCESSORS = 132
NONE, IDENTITY = -1, -2
"""Slots that stand for no state (zero) and, as the start of a scan, for the identity."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ends:
    """What reaches the buffer's documents from outside, and what they pass on."""

    enters: str = ""
    """Documents that a state enters: "" none, "first" or "all"."""
    leaves: str = ""
    """Documents whose last state another shard reads, or has a gradient: "" none, "last" or "all"."""
    shared: bool = False
    """Whether entering states and leaving gradients come from other shards, after they got this one's map."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Whole chunks of one document, which run one after the other."""

    document: int
    position: int
    """Segments of the same document before this one."""
    last: bool
    start: int
    """First token."""
    tokens: int
    chunk: int
    """First chunk in the buffer."""
    enters: bool
    """Whether a state from outside enters its document."""
    leaves: bool

    @property
    def chunks(self) -> int:
        return -(-self.tokens // CHUNK)


def cut(borders: tuple[int, ...], ends: Ends, longest: int) -> list[Segment]:
    """Segments of at most ``longest`` chunks, as equal as whole chunks allow, in the order of the buffer."""
    segments: list[Segment] = []
    chunk, documents = 0, len(borders) - 1
    for i in range(documents):
        chunks = -(-(borders[i + 1] - borders[i]) // CHUNK)
        parts = -(-chunks // longest)
        for p in range(parts):
            first, stop = chunks * p // parts, chunks * (p + 1) // parts
            start = borders[i] + first * CHUNK
            segments.append(
                Segment(
                    document=i,
                    position=p,
                    last=p == parts - 1,
                    start=start,
                    tokens=min(borders[i + 1], borders[i] + stop * CHUNK) - start,
                    chunk=chunk + first,
                    enters=ends.enters == "all" or (ends.enters == "first" and i == 0),
                    leaves=ends.leaves == "all" or (ends.leaves == "last" and i == documents - 1),
                )
            )
        chunk += chunks
    return segments


Rows = list[tuple[int, ...]]


@dataclass(kw_only=True, slots=True)
class Scan:
    """Passes of the scan kernel: chains of steps, each of which stores a state and applies a map."""

    chains: Rows = field(default_factory=list)
    """First step, number of steps, slot of the start, slot of the end."""
    steps: Rows = field(default_factory=list)
    """Slot that gets the state before the step, slots of the map's written part and of its transition."""

    def add(self, steps: Rows, start: int, end: int) -> None:
        self.chains.append((len(self.steps), len(steps), start, end))
        self.steps += steps


@dataclass(kw_only=True, slots=True)
class Direction:
    """Work of one direction, in rows of (first token, tokens, first chunk, slot in, slot out, identity)."""

    maps: Rows = field(default_factory=list)
    """Segments whose own map is computed; with the last column set, its transition."""
    main: Rows = field(default_factory=list)
    """All segments, with the states that enter them (from the right in the backward direction)."""
    shard: Scan = field(default_factory=Scan)
    """Joins the maps of a document that goes on in the next shard."""
    transition: Scan = field(default_factory=Scan)
    """Its transition, where a state also enters that document."""
    enter: Scan = field(default_factory=Scan)
    """From what enters the documents to what enters their segments."""
    written: int = 0
    """Slots of the maps' written parts."""
    states: int = 0
    """Slots of entering states, other than those that come from outside unchanged."""


def plan_states(
    borders: tuple[int, ...], ends: Ends, longest: int, *, backward: bool
) -> tuple[Direction, int]:
    """How states (their gradients if ``backward``) pass through documents cut into ``longest`` chunks.

    Also returns the number of transitions. They take the first slots of the forward direction's maps and are
    read again backward.
    """
    segments = cut(borders, ends, longest)
    slots: dict[int, int] = {}
    chains: dict[int, list[int]] = {}
    for i, s in enumerate(segments):
        chains.setdefault(s.document, []).append(i)
        if (s.position or (s.enters and ends.shared)) and (not s.last or (s.leaves and ends.shared)):
            slots[i] = len(slots)
    out = Direction(written=0 if backward else len(slots))
    direct = len(chains) == len(segments) and not ends.shared
    for chain in chains.values():
        _document(out, segments, chain[::-1] if backward else chain, slots, ends, direct, backward)
    out.main.sort(key=lambda row: -row[1])
    out.maps.sort(key=lambda row: -row[1])
    return out, len(slots)


def _document(
    out: Direction,
    segments: list[Segment],
    chain: list[int],
    slots: dict[int, int],
    ends: Ends,
    direct: bool,
    backward: bool,
) -> None:
    """Add the rows of one document, whose segments are met in the order of ``chain``."""
    s = segments[chain[0]]
    into, away = (s.leaves, s.enters) if backward else (s.enters, s.leaves)
    outside = s.document if "all" in (ends.enters, ends.leaves) else 0
    steps: Rows = []
    for n, i in enumerate(chain):
        s, end = segments[i], i == chain[-1]
        slot = written = transition = NONE
        if direct:
            slot = outside if into else NONE
        elif n or into:
            slot, out.states = out.states, out.states + 1
        out.main.append((s.start, s.tokens, s.chunk, slot, s.document if end else NONE, 0))
        if not end or (away and ends.shared):
            written, out.written = out.written, out.written + 1
            # the first segment met starts from a state that is known, unless other shards have yet to say it
            known = outside if n == 0 and into and not ends.shared else NONE
            out.maps.append((s.start, s.tokens, s.chunk, known, written, 0))
            if n or (into and ends.shared):
                transition = slots[i]
                if not backward:
                    out.maps.append((s.start, s.tokens, s.chunk, NONE, transition, 1))
        steps.append((slot, written, transition))
    if not direct and (len(chain) > 1 or into):
        out.enter.add(steps, outside if into else NONE, NONE)
    if away and ends.shared:
        out.shard.add([(NONE, w, m) for _, w, m in steps], NONE, outside)
        if into:
            out.transition.add([(NONE, NONE, m) for _, _, m in steps], IDENTITY, outside)


PARTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128)
SHORTEST = 16
"""Chunks below which a segment is not worth its map."""
STEP, LAUNCH = 4.0, 50.0
"""Microseconds a segment of a scan, and of the host a launch."""
SPEED = {
    "output": ({128: (2.06, 1), 64: (1.26, 1)}, 0.0237),
    "states": ({128: (2.5, 1), 64: (1.36, 1)}, 0.0284),
    "back": ({128: (2.2, 1), 64: (1.3, 1), 32: (1.1, 1)}, 0.032),
    "maps": ({128: (1.29, 1), 64: (1.2, 2)}, 0.0116),
    "back maps": ({128: (2.0, 1), 64: (1.2, 1), 32: (1.2, 1)}, 0.0175),
}
"""By kind of chain, measured on one H200: microseconds a chunk of a program that keeps so many value
channels and programs that share a processor at that speed; microseconds of traffic a chunk and head."""


def block_of(chunks: list[int], heads: int, kind: str) -> tuple[int, float]:
    """Value channels a program keeps, and the microseconds all chains, of so many chunks each, then take."""
    programs, memory = SPEED[kind]
    total, longest = sum(chunks) * heads, max(chunks, default=0)
    best, least = 128, float("inf")
    for block, (step, resident) in programs.items():
        split, room = 128 // block, resident * PROCESSORS
        rounds = total * split / room / max(longest, 1)
        if len(chunks) * heads * split <= room:
            rounds = 1.0
        elif rounds < 4:
            rounds = max(1.0, math.ceil(rounds))
        time = max(rounds * longest * step, total * memory)
        if time < 0.97 * least:
            best, least = block, time
    return best, least


@lru_cache(maxsize=64)
def longest_segment(borders: tuple[int, ...], heads: int, ends: Ends) -> int:
    """Chunks of a segment for which the chains of forward and backward together take least time."""
    documents = [-(-(b - a) // CHUNK) for a, b in pairwise(borders)]
    whole = max(documents)
    floor = sum(documents) * heads * sum(SPEED[kind][1] for kind in ("output", "states", "back"))
    best, least = whole, float("inf")
    for parts in PARTS:
        size = -(-whole // parts)
        if least < 1.1 * floor + 4 * LAUNCH or (parts > 1 and size < SHORTEST):
            break
        time = _microseconds(documents, heads, ends, size)
        if time < 0.99 * least:
            best, least = size, time
    return best


def _microseconds(documents: list[int], heads: int, ends: Ends, longest: int) -> float:
    """Of all chains and scans, for documents of so many chunks cut into segments of at most ``longest``."""
    main, maps, back_maps, deepest = [], [], [], 1
    for i, chunks in enumerate(documents):
        parts = -(-chunks // longest)
        pieces = [chunks * (p + 1) // parts - chunks * p // parts for p in range(parts)]
        enters = ends.shared and (ends.enters == "all" or (ends.enters == "first" and i == 0))
        leaves = ends.leaves == "all" or (ends.leaves == "last" and i == len(documents) - 1)
        last = parts if ends.shared and leaves else parts - 1
        main += pieces
        maps += pieces[:last] + pieces[0 if enters else 1 : last]
        back_maps += pieces[0 if enters else 1 :]
        deepest = max(deepest, parts)
    time = sum(block_of(main, heads, kind)[1] for kind in ("output", "states", "back"))
    time += block_of(maps, heads, "maps")[1] + block_of(back_maps, heads, "back maps")[1]
    return time + (4 * LAUNCH + 2 * STEP * deepest if deepest > 1 else 0.0)


@dataclass(kw_only=True, slots=True)
class Tables:
    """A ``Direction`` on the device, and the value channels of its programs."""

    plan: Direction
    transitions: int
    rows: dict[str, Tensor]
    """int32 [., columns] by the names of ``Direction``'s and ``Scan``'s parts."""
    blocks: dict[str, int]


@lru_cache(maxsize=32)
def tables(
    borders: tuple[int, ...], heads: int, ends: Ends, backward: bool, longest: int, device: torch.device
) -> Tables:
    """One copy for all layers of a step, and for all steps with the same borders."""
    plan, transitions = plan_states(borders, ends, longest, backward=backward)
    parts = {"main": plan.main, "maps": plan.maps}
    for name in ("shard", "transition", "enter"):
        scan: Scan = getattr(plan, name)
        parts |= {name: scan.chains, f"{name} steps": scan.steps}
    kinds = ("back", "back maps") if backward else ("output", "states", "maps")
    return Tables(
        plan=plan,
        transitions=transitions,
        rows=upload(parts, device),
        blocks={k: block_of(_chunks(plan.maps if "maps" in k else plan.main), heads, k)[0] for k in kinds},
    )


def _chunks(rows: Rows) -> list[int]:
    return [-(-row[1] // CHUNK) for row in rows]


def upload(parts: dict[str, Rows], device: torch.device) -> dict[str, Tensor]:
    """int32 tables by name, in one copy; each begins at a multiple of 16 bytes."""
    flat: list[int] = []
    places: dict[str, tuple[int, int, int]] = {}
    for name, rows in parts.items():
        if rows:
            places[name] = (len(flat), len(rows), len(rows[0]))
            flat += [x for row in rows for x in row]
            flat += [0] * (-len(flat) % 4)
    host = torch.tensor(flat, dtype=torch.int32)
    here = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
    return {name: here[at : at + n * width].view(n, width) for name, (at, n, width) in places.items()}
