"""Which checkpoint is chosen, what is kept, what is cleared away: with small files in place of tensors."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from k3train.checkpoint import folder, manifest
from k3train.checkpoint.folder import clear_leftovers, newest_good, prune, set_aside, step_name, verify
from k3train.checkpoint.listing import committed
from k3train.checkpoint.manifest import CheckpointError, Manifest, digest_file, read_manifest, write_manifest
from tests.damage import DAMAGE, OTHER


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


def test_a_checkpoint_under_another_step_s_name_is_refused(tmp_path: Path) -> None:
    make(tmp_path, 8)
    make(tmp_path, 6).rename(tmp_path / step_name(99))
    with pytest.raises(CheckpointError, match=f"{step_name(99)} holds step 6, not 99"):
        newest_good(tmp_path)


def test_a_fresh_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert newest_good(tmp_path) is None
    assert newest_good(tmp_path / "none") is None


def test_the_newest_good_one_is_chosen_and_the_hint_is_not_trusted(tmp_path: Path) -> None:
    for step in (5, 100, 20):
        make(tmp_path, step)
    (tmp_path / folder.LATEST).write_text(step_name(5))
    assert newest_good(tmp_path) == tmp_path / step_name(100)


@pytest.mark.parametrize("name", ["a.distcp", "b.distcp", "state.json", manifest.MANIFEST])
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_found_and_the_older_checkpoint_is_used(
    tmp_path: Path, kind: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, OTHER)
    damaged = make(tmp_path, 20)
    verify(damaged)
    DAMAGE[kind](damaged / name)
    with pytest.raises(CheckpointError, match=step_name(20)):
        verify(damaged)
    assert newest_good(tmp_path) == tmp_path / step_name(OTHER)
    assert f"checkpoint {step_name(20)} is passed over" in caplog.text


def test_a_run_never_starts_from_nothing_because_all_are_damaged(tmp_path: Path) -> None:
    for step in (10, 20):
        (make(tmp_path, step) / "a.distcp").unlink()
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints can be used"):
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


def test_what_is_left_out_does_not_count_and_goes_when_the_run_has_overtaken_it(tmp_path: Path) -> None:
    """The run has gone back to step 30, and saves at steps below those that it must not use again."""
    for step in (10, 20, 30, 40, 50):
        make(tmp_path, step, milestone=step == 30)
    set_aside(tmp_path, lambda step, path: "left out" if step > 35 else None, after=30)
    assert newest_good(tmp_path) == tmp_path / step_name(30)
    assert [name.partition(".passed-")[0] for name in names(tmp_path) if ".passed-" in name] == [
        step_name(40),
        step_name(50),
    ]
    kept = []
    for step in (33, 40, 47, 51, 60):
        make(tmp_path, step)
        prune(tmp_path, keep=2)
        kept.append([name.partition("-")[0] for name in names(tmp_path)])
    passed = [f"{step_name(step)}.passed" for step in (40, 50)]
    assert kept == [
        [step_name(30), step_name(33), *passed],
        [step_name(30), step_name(33), step_name(40), *passed],
        [step_name(30), step_name(40), passed[0], step_name(47), passed[1]],
        [step_name(30), step_name(47), passed[1], step_name(51)],
        [step_name(30), step_name(51), step_name(60)],
    ]


def test_what_could_not_be_read_keeps_its_name_and_takes_no_place(tmp_path: Path) -> None:
    """One start went on from step 20, for a reason that may pass; the next may find step 50 well."""
    for step in (10, 20, 50):
        make(tmp_path, step, milestone=step == 50)
    set_aside(tmp_path, lambda step, path: None, after=20)
    for step in (30, 40):
        make(tmp_path, step)
        prune(tmp_path, keep=2, written=step)
    assert names(tmp_path) == [step_name(step) for step in (30, 40, 50)]


def test_prune_spares_what_a_rollback_can_use(tmp_path: Path) -> None:
    """Saves of time limits and stops may lie closer together than those that are due."""
    for step in (80, 90, 98, 100):
        make(tmp_path, step)
        prune(tmp_path, keep=2, reach=4)
    assert names(tmp_path) == [step_name(step) for step in (90, 98, 100)]
    make(tmp_path, 110)
    prune(tmp_path, keep=2, reach=4)
    assert names(tmp_path) == [step_name(step) for step in (100, 110)]


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


def test_a_folder_that_cannot_be_read_is_no_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nowhere").symlink_to("gone")
    (tmp_path / "file").write_text("x")
    for name, words in {"loop": "be read", "nowhere": "leads nowhere", "file": "be read"}.items():
        with pytest.raises(CheckpointError, match=words):
            newest_good(tmp_path / name)


@contextmanager
def without_rights() -> Iterator[None]:
    """Root may read everything."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_what_may_not_be_read_is_passed_over_or_named() -> None:
    directory = Path(tempfile.mkdtemp())
    try:
        directory.chmod(0o755)
        older, newer = make(directory, 10), make(directory, 20)
        newer.chmod(0)
        with without_rights():
            assert newest_good(directory) == older
        newer.chmod(0o700)
        directory.chmod(0)
        with without_rights(), pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
            newest_good(directory)
    finally:
        directory.chmod(0o700)
        shutil.rmtree(directory)


def test_odd_folders_with_a_checkpoints_name_stop_no_scan_and_no_clearing(tmp_path: Path) -> None:
    good = make(tmp_path, 10)
    (tmp_path / step_name(20)).symlink_to(step_name(20))
    (tmp_path / step_name(30)).write_text("a file")
    (tmp_path / step_name(40)).symlink_to("gone")
    (tmp_path / "step_00000050.tmp-0a").symlink_to(step_name(10))
    (tmp_path / "step_00000060.tmp-0a").write_text("a file")
    assert newest_good(tmp_path) == good
    clear_leftovers(tmp_path)
    assert newest_good(tmp_path) == good
    assert "step_00000050.tmp-0a" not in names(tmp_path)


@pytest.mark.parametrize(
    "body",
    [
        [],
        {"format": "x"},
        {"format": 1, "files": [1]},
        {"format": 1, "files": {"a": {"size": 1}}},
        {"format": 1, "files": {"../a": {"size_bytes": 1, "xxh3_128": ""}}, "step": 1, "milestone": False},
    ],
)
def test_a_manifest_of_another_shape_is_damaged(tmp_path: Path, body: Any) -> None:
    make(tmp_path, 10)
    path = make(tmp_path, 20)
    sealed = {**body, "self": manifest._self_digest(body)} if isinstance(body, dict) else body
    (path / manifest.MANIFEST).write_text(json.dumps(sealed))
    assert newest_good(tmp_path) == tmp_path / step_name(10)


def test_a_deeply_nested_manifest_is_damaged(tmp_path: Path) -> None:
    path = make(tmp_path, 10)
    (path / manifest.MANIFEST).write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="nested too deeply"):
        verify(path)


def test_what_everybody_can_write_is_refused(tmp_path: Path) -> None:
    make(tmp_path, 10)
    path = make(tmp_path, 20)
    for open_to_all in (path, path / "a.distcp", path / manifest.MANIFEST, tmp_path):
        mode = open_to_all.stat().st_mode
        open_to_all.chmod(mode | stat.S_IWOTH)
        for load in (verify, lambda _: newest_good(tmp_path)):
            with pytest.raises(CheckpointError, match=f"{open_to_all} can be written by everybody"):
                load(path)
        open_to_all.chmod(mode)
    tmp_path.chmod(0o1777)  # as /tmp
    verify(path)
    assert newest_good(tmp_path) == path


def test_what_belongs_to_another_user_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    make(tmp_path, 10)
    path = make(tmp_path, 20)
    for given in (path, path / "b.distcp"):
        os.chown(given, 65534, -1)
        with pytest.raises(CheckpointError, match=f"{given} belongs to user 65534"):
            newest_good(tmp_path)
        os.chown(given, 0, -1)
    assert newest_good(tmp_path) == path
