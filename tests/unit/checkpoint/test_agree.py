"""All ranks raise what one has met, and whose fault it is."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from k3train.checkpoint import folder
from k3train.checkpoint.agree import every_rank
from k3train.checkpoint.folder import newest_good
from k3train.checkpoint.manifest import CheckpointError, CheckpointFault
from tests.ranks import run_ranks
from tests.unit.checkpoint.test_folder import make

ERRORS = {
    "OutOfMemoryError: CUDA out of memory": torch.OutOfMemoryError("CUDA out of memory"),
    "MemoryError: ": MemoryError(),
    "RuntimeError: [enforce fail] can't allocate memory": RuntimeError(
        "[enforce fail] can't allocate memory"
    ),
    "a.distcp: Stale file handle": OSError(errno.ESTALE, "Stale file handle", "a.distcp"),
    "ValueError: CUDA is a word here": ValueError("CUDA is a word here"),
    "a.distcp: No space left on device": OSError(errno.ENOSPC, "No space left on device", "a.distcp"),
    "a.distcp is damaged": CheckpointError("a.distcp is damaged"),
}


def _fail(rank: int) -> list[tuple[type, str]]:
    met = []
    for error in ERRORS.values():

        def work(error: Exception = error) -> None:
            if rank:
                raise error

        with pytest.raises(CheckpointError) as raised:
            every_rank(work)
        met.append((type(raised.value), str(raised.value)))
    return met


def test_every_rank_raises_what_one_has_met() -> None:
    one, other = run_ranks(2, _fail)
    assert one == other
    assert [kind for kind, _ in one] == [CheckpointFault] * 4 + [CheckpointError] * 3
    assert [text for _, text in one] == [f"{text} (rank 1; 1 of 2 ranks failed)" for text in ERRORS]


def test_no_checkpoint_is_passed_over_because_memory_was_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20):
        make(tmp_path, step)

    def check_files(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(folder, "check_files", check_files)
    with pytest.raises(CheckpointFault):
        newest_good(tmp_path)
