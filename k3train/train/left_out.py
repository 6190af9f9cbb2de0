"""Steps whose batches a run leaves out, in a file of the run: a restart does the same."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from k3train.checkpoint.agree import on_first_rank
from k3train.checkpoint.manifest import write_durably
from k3train.config.problems import BadInput

LEFT_OUT = "left_out_steps.json"
"""Name of the file in the run's folder."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Steps ``first`` to ``last``, counted from 1 over the run: their tokens count, nothing is learned."""

    first: int
    last: int
    why: str
    """nonfinite, spike, or rollback."""


def read_left_out(run_dir: Path) -> list[LeftOut]:
    """What the run has left out so far. Every rank must call this; rank 0 reads.

    Raises CheckpointError (BadInput), on every rank, when the file is there and cannot be read.
    """
    return on_first_rank(lambda: _read(run_dir / LEFT_OUT))


def write_left_out(run_dir: Path, entries: list[LeftOut]) -> None:
    """Replace the file, before anything else shows that a step was left out. Every rank must call this."""
    content = json.dumps([asdict(entry) for entry in entries], indent=1).encode()
    on_first_rank(lambda: write_durably(run_dir / LEFT_OUT, content))


def _read(path: Path) -> list[LeftOut]:
    try:
        return [LeftOut(**entry) for entry in json.loads(path.read_bytes())]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(
            f"{path} cannot be read ({error}); it lists the batches that the run leaves out. Restore it, or "
            "remove it to judge them anew"
        ) from error
