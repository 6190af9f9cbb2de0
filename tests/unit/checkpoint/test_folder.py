"""Which checkpoint is chosen, what is kept, what is cleared away: with small files in place of tensors."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from k3train.checkpoint import folder, manifest
from k3train.checkpoint.folder import clear_leftovers, committed, newest_good, prune, step_name, verify
from k3train.checkpoint.manifest import CheckpointError, Manifest, digest_file, read_manifest, write_manifest


def make(directory: Path, step: int, *, milestone: bool = False) -> Path:
    path = directory / step_name(step)
    path.mkdir(parents=True)
    for name in ("a.distcp", "b.distcp", "state.json"):
        (path / name).write_bytes(f"{name} of {step} ".encode() * 50)
    files = {each.name: digest_file(each) for each in path.iterdir()}
    write_manifest(path, Manifest(step=step, milestone=milestone, files=files))
    return path


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_fresh_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert newest_good(tmp_path) is None
    assert newest_good(tmp_path / "none") is None


def test_the_newest_good_one_is_chosen_and_the_hint_is_not_trusted(tmp_path: Path) -> None:
    for step in (5, 100, 20):
        make(tmp_path, step)
    (tmp_path / folder.LATEST).write_text(step_name(5))
    assert newest_good(tmp_path) == tmp_path / step_name(100)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def flip(path: Path, at: float) -> None:
    content = bytearray(path.read_bytes())
    content[min(int(at * len(content)), len(content) - 1)] ^= 0x40
    path.write_bytes(content)


def take_from(path: Path, step: int) -> None:
    shutil.copyfile(path.parent.parent / step_name(step) / path.name, path)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "empty": lambda path: os.truncate(path, 0),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "one byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "one byte long": lambda path: os.truncate(path, path.stat().st_size + 1),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)) and None,
    "first bit": lambda path: flip(path, 0.0),
    "middle bit": lambda path: flip(path, 0.5),
    "last bit": lambda path: flip(path, 1.0),
    "a folder": replace_by_folder,
    "a symlink loop": replace_by_loop,
    "from another checkpoint": lambda path: take_from(path, 10),
}


@pytest.mark.parametrize("name", ["a.distcp", "b.distcp", "state.json", manifest.MANIFEST])
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_found_and_the_older_checkpoint_is_used(
    tmp_path: Path, kind: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, 10)
    damaged = make(tmp_path, 20)
    verify(damaged)
    DAMAGE[kind](damaged / name)
    with pytest.raises(CheckpointError, match=step_name(20)):
        verify(damaged)
    assert newest_good(tmp_path) == tmp_path / step_name(10)
    assert f"checkpoint {step_name(20)} is passed over" in caplog.text


def test_a_run_never_starts_from_nothing_because_all_are_damaged(tmp_path: Path) -> None:
    for step in (10, 20):
        (make(tmp_path, step) / "a.distcp").unlink()
    with pytest.raises(CheckpointError, match="all 2 checkpoints are damaged"):
        newest_good(tmp_path)


def test_a_folder_without_manifest_was_never_completed(tmp_path: Path) -> None:
    make(tmp_path, 10)
    (tmp_path / step_name(20)).mkdir()
    assert newest_good(tmp_path) == tmp_path / step_name(10)


def test_a_newer_format_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "FORMAT", 2)
    path = make(tmp_path, 10)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="format 2, this k3train reads up to 1"):
        verify(path)


def test_other_names_are_no_checkpoints(tmp_path: Path) -> None:
    make(tmp_path, 10)
    for name in ("step_20", "step_x", "notes", "step_00000030.tmp-ab12", "step_00000030.old"):
        (tmp_path / name).mkdir()
    (tmp_path / folder.LATEST).write_text("rubbish")
    assert committed(tmp_path) == [(10, tmp_path / step_name(10))]


def test_prune_keeps_the_newest_and_the_milestones(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        make(tmp_path, step, milestone=step in (10, 30))
    assert sorted(prune(tmp_path, keep=2)) == [step_name(20)]
    assert names(tmp_path) == [step_name(step) for step in (10, 30, 40, 50)]


def test_prune_never_leaves_fewer_than_two(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        make(tmp_path, step)
    prune(tmp_path, keep=0)
    assert names(tmp_path) == [step_name(20), step_name(30)]


def test_damaged_checkpoints_do_not_count_towards_keep(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        make(tmp_path, step)
    for step in (20, 40):
        (tmp_path / step_name(step) / "b.distcp").unlink()
    assert prune(tmp_path, keep=2) == []
    assert newest_good(tmp_path) == tmp_path / step_name(30)
    make(tmp_path, 50)
    assert sorted(prune(tmp_path, keep=2)) == [step_name(10), step_name(20)]
    assert newest_good(tmp_path) == tmp_path / step_name(50)


def test_leftovers_go_and_committed_checkpoints_stay(tmp_path: Path) -> None:
    make(tmp_path, 10)
    for name in ("step_00000020.tmp-0f", "step_00000005.pruned-0f"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_text("x")
    clear_leftovers(tmp_path)
    assert names(tmp_path) == [step_name(10)]
    clear_leftovers(tmp_path / "none")


def test_a_checkpoint_set_aside_comes_back_when_its_successor_never_came(tmp_path: Path) -> None:
    aside = make(tmp_path, 10)
    aside.rename(tmp_path / f"{aside.name}.replaced-0f")
    clear_leftovers(tmp_path)
    assert newest_good(tmp_path) == aside


def test_a_checkpoint_set_aside_goes_when_its_successor_is_there(tmp_path: Path) -> None:
    aside = make(tmp_path, 10)
    aside.rename(tmp_path / f"{aside.name}.replaced-0f")
    make(tmp_path, 10)
    clear_leftovers(tmp_path)
    assert names(tmp_path) == [step_name(10)]


def test_the_manifest_survives_its_round_trip(tmp_path: Path) -> None:
    path = make(tmp_path, 10, milestone=True)
    found = read_manifest(path)
    assert (found.step, found.milestone) == (10, True)
    assert found.files["a.distcp"] == digest_file(path / "a.distcp")
