"""A checkpoint goes on with its own settings and its own text only, whatever run.yaml says."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from k3train.config.schema import Checkpoint, Source
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


def test_other_text_of_a_source_that_only_an_earlier_stage_has_drawn_from_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path, checkpoint=Checkpoint(every_steps=2, keep=9))
    run.data.sources["more"] = Source(path=str(tmp_path / "corpus" / "more"))
    make_corpus(tmp_path / "corpus" / "more", documents=300, seed=3)
    first, second = (run.curriculum.stages[name] for name in run.curriculum.order)
    first.mix, second.mix = {"counting": 1.0, "more": 1.0}, {"counting": 1.0}
    assert train_run(run) == [0]
    shutil.rmtree(sorted((tmp_path / "run" / "checkpoints").glob("step_*"))[-1])  # the end of the second
    shutil.rmtree(tmp_path / "corpus" / "more")
    make_corpus(tmp_path / "corpus" / "more", documents=300, seed=99)
    for override in ([], ["optim"]):
        run.resume.override = override
        with pytest.raises(RanksFailed, match=r"data\.sources\.more: .* is not the text that this run was"):
            train_run(run)
    run.resume.override = ["data.sources.more.path"]
    assert train_run(run) == [0]
