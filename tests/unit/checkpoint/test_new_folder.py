"""A conversion's folder appears whole, and messages name it and no scratch folder."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from k3train.checkpoint.hf.new_folder import check_new, new_folder
from k3train.checkpoint.manifest import CheckpointError, CheckpointNotWritten


def test_the_folder_appears_when_it_is_filled(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    check_new(out)
    with new_folder(out) as scratch:
        (scratch / "file").write_text("x")
        assert not out.exists()
    assert (out / "file").read_text() == "x"
    with pytest.raises(CheckpointError, match="exists: give a new folder"):
        check_new(out)


@pytest.mark.parametrize(
    "error", [ValueError("any"), KeyboardInterrupt(), OSError(errno.EIO, "bad", "/source")]
)
def test_what_fails_leaves_nothing_and_is_told_as_it_is(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), new_folder(tmp_path / "out"):
        raise error
    assert list(tmp_path.iterdir()) == []


def fill_up(out: Path, *files: str) -> None:
    with new_folder(out) as scratch:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *(str(scratch / file) for file in files))


@pytest.mark.parametrize("files", [(), ("file",)])
def test_a_full_disk_names_the_folder_that_was_asked_for(tmp_path: Path, files: tuple[str, ...]) -> None:
    refused = pytest.raises(CheckpointNotWritten, match=f"^{tmp_path}/out cannot be made: No space left")
    with refused as told:
        fill_up(tmp_path / "out", *files)
    assert ".tmp-" not in str(told.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_the_right_to_write_is_refused_before_anything_is_read() -> None:
    root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o555)
        if root:  # root may write everywhere
            os.seteuid(65534)
        try:
            with pytest.raises(
                CheckpointNotWritten, match=f"x cannot be made: {name} may not be written; give"
            ):
                check_new(Path(name) / "deep" / "x")
        finally:
            if root:
                os.seteuid(0)
            Path(name).chmod(0o755)
