"""One start at a time in a run's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3train.config.problems import ConfigError, Unavailable
from k3train.config.schema import Run
from k3train.train.claim import LOCK, claimed


def test_second_start_is_told_who_has_the_folder(tmp_path: Path) -> None:
    run = Run(dir=str(tmp_path / "new" / "run"))
    with claimed(run):
        with pytest.raises(ConfigError, match=r"in use by process \d+ on") as refusal, claimed(run):
            pass
        assert [problem.id for problem in refusal.value.problems] == ["run.in-use"]
    with claimed(run):
        pass


def test_what_a_killed_start_left_does_not_keep_the_next_out(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("process 1 on elsewhere, which died\n")
    with claimed(Run(dir=str(tmp_path))):
        assert "elsewhere" not in (tmp_path / LOCK).read_text()


def test_folder_that_cannot_be_made_or_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "file" / "x")
    for name in ("file", "file/run", "dangling"):
        refused = pytest.raises(Unavailable, match=f"dir = .*{name} cannot hold the run: ")
        with refused, claimed(Run(dir=str(tmp_path / name))):
            pass
