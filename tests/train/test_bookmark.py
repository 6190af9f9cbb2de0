"""Runs too long for the whole plan: a start reads on in the same text and plans none of what lies before."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k3train.checkpoint.folder import step_name
from k3train.checkpoint.manifest import digest_file, read_manifest, write_manifest
from k3train.config.schema import Checkpoint, Run
from k3train.config.trained import TRAIN_STATE
from tests.ranks import RanksFailed, run_ranks
from tests.train.runs import make_corpus, make_run, train_rank

SHORT, LONG = 128, 256
"""Context of the two stages: 12 steps and 6, of which a window fills one or two."""
STEPS = 18


def _train_noting(rank: int, run: Run, notes: Path) -> int:
    """Train as a rank does; a line of ``notes`` for each stage built, window made and step taken."""
    from k3train.data import plan, sources
    from k3train.train import loop

    sources._EXACT_DOCUMENTS = 0
    plan.MIN_WINDOW_SEQUENCES = 4
    file = (notes / f"rank {rank}").open("w")
    build_stage, make, train_step = loop.build_stage, plan.StageOrder._make, loop.train_step

    def note(**what: Any) -> None:
        file.write(json.dumps(what) + "\n")
        file.flush()

    def noted_build(*args: Any) -> Any:
        note(stage=args[2].name)
        return build_stage(*args)

    def noted_make(order: plan.StageOrder, begin: plan.Place) -> Any:
        note(window=[order.context_tokens, begin.window])
        return make(order, begin)

    def noted_step(setup: Any, progress: Any, batches: list, **options: Any) -> Any:
        sequences = [[p.source, p.document, p.start, p.length] for b in batches for p in b.documents]
        note(step=progress.step + 1, dp_rank=setup.groups.dp_rank, documents=sequences)
        return train_step(setup, progress, batches, **options)

    loop.build_stage, plan.StageOrder._make, loop.train_step = noted_build, noted_make, noted_step
    return train_rank(rank, run)


def noted(run: Run, notes: Path) -> list[list[dict[str, Any]]]:
    """Train to the end; the notes of each rank."""
    notes.mkdir()
    assert set(run_ranks(run.cluster.ranks_per_node, _train_noting, run, notes)) == {0}
    paths = sorted(notes.iterdir())
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]


def documents(ranks: list[list[dict[str, Any]]]) -> dict[int, list]:
    """The documents of every step, of all data-parallel ranks in order."""
    steps = {(n["step"], n["dp_rank"]): n["documents"] for notes in ranks for n in notes if "step" in n}
    together: dict[int, list] = {}
    for (step, _), each in sorted(steps.items()):
        together.setdefault(step, []).extend(each)
    return together


def windows(notes: list[dict[str, Any]], context: int) -> set[int]:
    """Numbers of the windows of that context that were made."""
    return {n["window"][1] for n in notes if "window" in n and n["window"][0] == context}


def small_windows(folder: Path, ranks: int) -> Run:
    run = make_run(folder, ranks=ranks, checkpoint=Checkpoint(every_steps=1, keep=STEPS))
    run.data.pack_window_tokens = 1
    return run


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A folder with an uninterrupted run of one rank and every checkpoint of it; its notes."""
    folder = tmp_path_factory.mktemp("golden")
    (notes,) = noted(small_windows(folder, 1), folder / "notes")
    return folder, notes


def cut_back(golden: Path, folder: Path, step: int, *, ranks: int, bookmark: bool) -> Run:
    """The golden run as it stood after a step; without a bookmark as older checkpoints are."""
    shutil.copytree(golden / "run", folder / "run")
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(folder / "run" / "checkpoints" / step_name(later))
    if not bookmark:
        path = folder / "run" / "checkpoints" / step_name(step)
        record = json.loads((path / TRAIN_STATE).read_text())
        del record["train"]["data"]["bookmark"]
        (path / TRAIN_STATE).write_text(json.dumps(record))
        manifest = read_manifest(path)
        files = {**manifest.files, TRAIN_STATE: digest_file(path / TRAIN_STATE)}
        write_manifest(path, replace(manifest, files=files))
    return replace(small_windows(golden, ranks), dir=str(folder / "run"))


def kept(run_dir: Path, step: int) -> dict[str, Any]:
    """What the checkpoint of a step tells of the data."""
    return json.loads((run_dir / "checkpoints" / step_name(step) / TRAIN_STATE).read_text())["train"]["data"]


def test_going_to_the_next_stage_plans_the_last_window_again(
    golden: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, notes = golden
    borders = [i for i, note in enumerate(notes) if "stage" in note]
    assert [notes[i]["stage"] for i in borders] == ["short", "long"]
    last = kept(folder / "run", 12)["bookmark"]["mark"]["window"]
    assert last >= 6
    assert windows(notes[: borders[1]], SHORT) >= set(range(last + 1))
    assert windows(notes[borders[1] :], SHORT) == {last}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("step", "context"),
    [(10, SHORT), (12, SHORT), (17, LONG)],
    ids=["in a stage", "a stage's start", "in the next"],
)
def test_a_start_reads_on_and_plans_nothing_before(
    golden: tuple[Path, list[dict[str, Any]]], tmp_path: Path, step: int, context: int, ranks: int
) -> None:
    """Two ranks are another layout than that of the checkpoint, and change it again between the stages."""
    folder, trained = golden
    expected = {s: each for s, each in documents([trained]).items() if s > step}
    assert len(expected) == STEPS - step
    at = kept(folder / "run", step)["bookmark"]["mark"]["window"]
    assert at > 0
    nearest = {SHORT: at, LONG: 0} if context == SHORT else {SHORT: None, LONG: at}
    for bookmark in (True, False):
        place = tmp_path / f"bookmark {bookmark}"
        place.mkdir()
        run = cut_back(folder, place, step, ranks=ranks, bookmark=bookmark)
        found = noted(run, place / "notes")
        assert documents(found) == expected
        for notes in found:
            first = {each: min(windows(notes, each), default=None) for each in (SHORT, LONG)}
            assert first == (nearest if bookmark else {SHORT: 0, LONG: 0})
        assert kept(place / "run", STEPS) == kept(folder / "run", STEPS), "the way here leaves no trace"


def test_other_text_or_another_seed_is_refused_before_anything_is_planned(
    golden: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    folder, _ = golden
    run = cut_back(folder, tmp_path, 10, ranks=1, bookmark=True)
    make_corpus(tmp_path / "other", documents=300, seed=99)
    run.data.sources["counting"].path = str(tmp_path / "other")
    with pytest.raises(RanksFailed, match=r"data\.sources\.counting\.path changed since the checkpoint"):
        noted(run, tmp_path / "refused")
    lines = (tmp_path / "refused" / "rank 0").read_text().splitlines()
    assert lines == ['{"stage": "short"}']
    run.resume.override = ["data.sources.counting.path"]
    (notes,) = noted(run, tmp_path / "accepted")
    assert min(windows(notes, SHORT)) == 0, "the order of the other text is planned from its beginning"
