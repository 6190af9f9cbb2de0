"""A checkpoint goes on with its own settings and its own text only, whatever run.yaml says."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.ranks import RanksFailed
from tests.train.runs import losses, make_corpus, make_run, train_run


def test_other_seed_or_other_text_under_the_same_path_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert train_run(run) == [0]
    trained = losses(run)
    stage_ends = sorted((tmp_path / "run" / "checkpoints").glob("step_*"))
    shutil.rmtree(stage_ends[-1])
    with pytest.raises(RanksFailed, match=r"seed = 7 was 1234 when .*step_00000016 was trained"):
        train_run(replace(run, seed=7))
    shutil.rmtree(tmp_path / "corpus" / "train")
    make_corpus(tmp_path / "corpus" / "train", documents=300, seed=99)
    with pytest.raises(RanksFailed, match=r"data\.sources\.counting: .* is not the text that this run was"):
        train_run(run)
    assert losses(run) == trained
