"""Files that say where a run stands, edited or written by something else: one sentence, no traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from k3train.checkpoint.folder import step_name
from k3train.checkpoint.load import read_train_state
from k3train.checkpoint.manifest import CheckpointError
from k3train.config.schema import Run
from k3train.train.guards import GuardState
from k3train.train.left_out import (
    LEFT_OUT,
    LeftOut,
    can_go_back,
    read_left_out,
    trained_what_is_left_out,
    write_left_out,
)
from k3train.train.progress import Progress
from k3train.train.resume import go_on


def test_steps_left_out_survive_their_round_trip(tmp_path: Path) -> None:
    assert read_left_out(tmp_path) == []
    entries = [LeftOut(3, 5, "rollback"), LeftOut(9, 9, "spike")]
    write_left_out(tmp_path, entries)
    assert read_left_out(tmp_path) == entries


def test_a_checkpoint_that_has_trained_what_was_left_out_later_is_not_gone_on_from(tmp_path: Path) -> None:
    def checkpoint(step: int, *known: LeftOut) -> tuple[int, Path]:
        path = tmp_path / step_name(step)
        path.mkdir()
        guards = GuardState(left_out=list(known)).to_json()
        (path / "train_state.json").write_text(json.dumps({"train": {"guards": guards}}))
        return step, path

    skipped, back = LeftOut(7, 7, "spike"), LeftOut(8, 11, "rollback")
    entries = [skipped, back]
    assert can_go_back(tmp_path, entries)  # to the start: there is no checkpoint yet
    inside = checkpoint(10, skipped)
    assert "steps 8 to 11: rollback" in (trained_what_is_left_out(entries, *inside) or "")
    assert not can_go_back(tmp_path, entries)
    assert trained_what_is_left_out(entries, *checkpoint(7)) is None
    assert trained_what_is_left_out(entries, *checkpoint(9, skipped, back)) is None
    assert can_go_back(tmp_path, entries)


NESTED = "[" * 100_000


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[1,",
        NESTED,
        "null",
        '{"a": 1}',
        '[{"first": 1}]',
        "[[1, 2, 3]]",
        '[{"first": "8", "last": 11, "why": "rollback"}]',
    ],
    ids=str.__len__,
)
def test_a_list_of_left_out_steps_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / LEFT_OUT).write_text(content)
    with pytest.raises(
        CheckpointError, match=rf"^{tmp_path}/{LEFT_OUT} cannot be read .* remove it to judge"
    ):
        read_left_out(tmp_path)


@pytest.mark.parametrize("content", ["", "{", NESTED], ids=str.__len__)
def test_a_train_state_that_is_damaged_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "train_state.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"train_state.json cannot be read as JSON: .*; use an older"):
        read_train_state(tmp_path)


@pytest.mark.parametrize("content", ["[]", "{}", "null", '{"train": []}'])
def test_a_train_state_of_another_shape_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "train_state.json").write_text(content)
    with pytest.raises(CheckpointError, match="holds no train state"):
        read_train_state(tmp_path)


@pytest.mark.parametrize("change", [{"step": None}, {"guards": {"of": 1}}, {"guards": 3}, {"bends": [1]}])
def test_a_state_that_another_version_wrote_is_named(tmp_path: Path, change: dict[str, Any]) -> None:
    state = {**Progress().to_json(), **change}
    if state["step"] is None:
        del state["step"]
    with pytest.raises(CheckpointError, match="go on with the version that wrote it"):
        go_on(Run(), state, tmp_path)
