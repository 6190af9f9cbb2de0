"""Steps whose batches a run leaves out, in a file of the run: a restart does the same."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from k3train.checkpoint.agree import on_first_rank
from k3train.checkpoint.listing import committed
from k3train.checkpoint.load import read_train_state
from k3train.checkpoint.manifest import CheckpointError, write_durably
from k3train.config.json_file import read_json
from k3train.config.problems import BadInput

LEFT_OUT = "left_out_steps.json"
"""Name of the file in the run's folder."""

ROLLBACK = "rollback"
"""Why steps are left out that the run has gone back for."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Steps ``first`` to ``last``, counted from 1 over the run: their tokens count, nothing is learned."""

    first: int
    last: int
    why: str
    """nonfinite, spike, or rollback."""

    def __str__(self) -> str:
        return f"steps {self.first} to {self.last}: {self.why}"


def read_left_out(run_dir: Path) -> list[LeftOut]:
    """What the run has left out so far. Every rank must call this; rank 0 reads.

    Raises CheckpointError (BadInput), on every rank, when the file is there and cannot be read.
    """
    return on_first_rank(lambda: _read(run_dir / LEFT_OUT))


def write_left_out(run_dir: Path, entries: list[LeftOut]) -> None:
    """Replace the file, before anything else shows that a step was left out. Every rank must call this."""
    content = json.dumps([asdict(entry) for entry in entries], indent=1).encode()
    on_first_rank(lambda: write_durably(run_dir / LEFT_OUT, content))


def trained_what_is_left_out(entries: list[LeftOut], step: int, path: Path) -> str | None:
    """Why a run that leaves ``entries`` out cannot go on from the checkpoint ``path`` after ``step``; None
    when it can.

    A rollback leaves out steps that have been trained: checkpoints from before the first of them are as if it
    had never been, and those that passed over them have the rollback in their own list. One rank is enough.
    """
    since = [entry for entry in entries if entry.why == ROLLBACK and entry.first <= step]
    if not since:
        return None
    try:
        known = [LeftOut(**entry) for entry in read_train_state(path)["guards"]["left_out"]]
    except (CheckpointError, KeyError, TypeError):
        return None  # damaged, which reading all its bytes tells better
    trained = next((entry for entry in since if entry not in known), None)
    return trained and f"{path} has trained steps that the run leaves out since ({trained}; {LEFT_OUT})"


def can_go_back(checkpoints: Path, entries: list[LeftOut]) -> bool:
    """Whether a run that leaves ``entries`` out has a checkpoint to go on from, or none yet and can begin at
    its start. Every rank must call this."""

    def look() -> bool:
        found = committed(checkpoints)
        return not found or any(trained_what_is_left_out(entries, *each) is None for each in found)

    return on_first_rank(look)


def _read(path: Path) -> list[LeftOut]:
    fix = "it lists the batches that the run leaves out. Restore it, or remove it to judge them anew"
    try:
        listed = read_json(path, BadInput, fix)
    except FileNotFoundError:
        return []
    if not isinstance(listed, list) or not all(map(_is_entry, listed)):
        raise BadInput(f"{path} cannot be read as a list of steps with first, last and why; {fix}")
    return [LeftOut(**entry) for entry in listed]


def _is_entry(entry: object) -> bool:
    return isinstance(entry, dict) and {name: type(value) for name, value in entry.items()} == {
        "first": int,
        "last": int,
        "why": str,
    }
