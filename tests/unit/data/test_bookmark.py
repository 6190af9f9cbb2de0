"""A bookmark leads to the text that planning from the beginning leads to, or it is not taken."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3train.config.problems import ConfigError
from k3train.config.schema import Run, Source, Stage
from k3train.curriculum.stages import stage_table
from k3train.data.indexed import CorpusError
from k3train.data.open import StageData, open_data
from k3train.data.plan import StageOrder
from k3train.data.preflight import check_data
from tests.unit.data.corpora import make_corpus, make_run, natural_lengths

ORDER = ["short", "long", "last"]
WINDOW = 4
"""Sequences of a window; a step has as many."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Three stages of 12, 9 and 3 steps and about as many windows, too many documents for the whole plan."""
    monkeypatch.setattr("k3train.data.sources._EXACT_DOCUMENTS", 0)
    monkeypatch.setattr("k3train.data.plan.MIN_WINDOW_SEQUENCES", WINDOW)
    make_corpus(tmp_path / "a", natural_lengths(400, largest=700))
    make_corpus(tmp_path / "b", natural_lengths(40, seed=1, largest=700), seed=1)

    def stage(context: int, steps: int, **mix: float) -> Stage:
        batch = WINDOW * context
        return Stage(context_tokens=context, tokens=steps * batch, batch_tokens=batch, mix=mix)

    return make_run(
        {
            "a": Source(path=str(tmp_path / "a"), max_epochs=3),
            "b": Source(path=str(tmp_path / "b"), max_epochs=8),
        },
        {"short": stage(256, 12, a=3, b=1), "long": stage(512, 9, a=1, b=1), "last": stage(1024, 3, a=1)},
        pack_window_tokens=0,
    )


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The context of every window that is made."""
    windows: list[int] = []
    make = StageOrder._make
    monkeypatch.setattr(
        StageOrder, "_make", lambda self, i: (windows.append(self.context_tokens), make(self, i))[1]
    )
    return windows


def opened(run: Run, stage: str, kept: dict[str, Any] | None = None) -> StageData:
    table = stage_table(run)
    return open_data(run, table, table[run.curriculum.order.index(stage)], kept)


def kept_at(run: Run, stage: str, step: int) -> dict[str, Any]:
    """What a checkpoint holds after so many steps of a stage."""
    data = opened(run, stage)
    data.close()
    return json.loads(json.dumps(data.bookmark(step)))


def told(data: StageData, first: int) -> list[Any]:
    """Everything about the steps of a stage from ``first`` on."""
    steps = range(first, data.stage.steps)
    each = [
        (data.documents(s), data.consumed(s + 1), data.positions(s + 1), data.bookmark(s + 1)) for s in steps
    ]
    return [data.fingerprint(), data.consumed(first), data.positions(first), each]


def test_a_bookmark_of_any_step_leads_to_the_same_text(run: Run, made: list[int]) -> None:
    table = stage_table(run)
    for plan in table:
        for step in range(1, plan.steps + 1):
            kept = kept_at(run, plan.name, step)
            for target in table[plan.index :]:
                first = step if target is plan else 0
                made.clear()
                marked = opened(run, target.name, kept)
                marked.positions(first)
                near = target is plan or (step == plan.steps and target.index == plan.index + 1)
                assert len(made) <= (3 if near else 30), (plan.name, step, target.name)
                assert told(marked, first) == told(opened(run, target.name), first), (plan.name, step)


def test_windows_of_a_start_do_not_grow_with_the_run(run: Run, made: list[int]) -> None:
    counts = []
    for times in (1, 3):
        longer = copy.deepcopy(run)
        longer.data.sources["a"].max_epochs = longer.data.sources["b"].max_epochs = 100
        for name, steps in (("short", 12 * times), ("long", 9 * times)):
            stage = longer.curriculum.stages[name]
            stage.tokens = steps * stage.batch_tokens
        for stage, step, target, first in (
            ("short", 11 * times, "short", 11 * times),
            ("short", 12 * times, "long", 0),
            ("long", 8 * times, "long", 8 * times),
        ):
            for kept in (kept_at(longer, stage, step), None):
                made.clear()
                opened(longer, target, kept).positions(first)
                counts.append(len(made))
    once, thrice = counts[:6], counts[6:]
    assert max(once[::2] + thrice[::2]) <= 3
    assert all(after > 2 * before for before, after in zip(once[1::2], thrice[1::2], strict=True))


def test_the_check_before_the_start_plans_nothing_of_a_long_run(run: Run, made: list[int]) -> None:
    check_data(run)
    assert not made


def test_a_short_run_counts_its_text_exactly_beside_a_bookmark(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = kept_at(run, "long", 5)
    monkeypatch.setattr("k3train.data.sources._EXACT_DOCUMENTS", 2_000_000)
    assert told(opened(run, "long", kept), 0) == told(opened(run, "long"), 0)


def put(key: str, value: Any) -> Callable[[Run], None]:
    """A change of one setting."""

    def change(run: Run) -> None:
        *parents, last = key.split(".")
        at: Any = run
        for name in parents:
            at = at[name] if isinstance(at, dict) else getattr(at, name)
        if isinstance(at, dict):
            at[last] = value
        else:
            setattr(at, last, value)

    return change


def add_a_source(run: Run) -> None:
    run.data.sources["c"] = Source(path=run.data.sources["a"].path)
    run.curriculum.stages["last"].mix["c"] = 1.0


def take_another_text(run: Run) -> None:
    run.data.sources["b"].path = run.data.sources["a"].path


DECIDE: dict[str, Callable[[Run], None]] = {
    "data.sources.b.path": take_another_text,
    **{
        key: put(key, value)
        for key, value in {
            "seed": 7,
            "data.pack_window_tokens": 9000,
            "data.sources.a.min_document_tokens": 9,
            "curriculum.stages.short.mix.a": 2.0,
            "curriculum.stages.short.tokens": 11 * 1024,
            "curriculum.stages.long.batch_tokens": 1024,
            "curriculum.stages.long.tokens": 2 * 2048,
            "curriculum.order": ["long", "last"],
        }.items()
    },
}
"""Changes after step 5 of the second stage that decide what came before."""

HARMLESS: dict[str, Callable[[Run], None]] = {
    "another split": put("curriculum.stages.long.micro_batch_sequences", 2),
    "a longer stage": put("curriculum.stages.long.tokens", 20 * 2048),
    "another mix to come": put("curriculum.stages.last.mix.b", 3.0),
    "a new source": add_a_source,
}
"""Changes that do not."""


@pytest.mark.parametrize("key", [*DECIDE, *HARMLESS])
def test_what_decided_the_text_before_it_is_compared(
    run: Run, key: str, made: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    kept = kept_at(run, "long", 5)
    (DECIDE | HARMLESS)[key](run)
    if key in DECIDE:
        with pytest.raises(CorpusError, match=rf"{key}\b.* changed since the checkpoint.*override=\[.*{key}"):
            opened(run, "long", kept)
        run.resume.override = [key]
    made.clear()
    opened(run, "last", kept)
    assert made[0] == (
        run.curriculum.stages[run.curriculum.order[0]].context_tokens if key in DECIDE else 512
    )
    assert ("planned again" in caplog.text) is (key in DECIDE)
    for stage, first in (("long", 5), ("last", 0)):
        assert told(opened(run, stage, kept), first) == told(opened(run, stage), first)


@pytest.mark.parametrize("step", range(1, 10))
@pytest.mark.parametrize("before", [3.0, 2.5])
@pytest.mark.parametrize("after", [1.0, 1.25, 1.5, 2.0, 2.25, 2.5, 2.75, 3.0, 8.0])
def test_epochs_count_as_far_as_they_were_begun(run: Run, step: int, before: float, after: float) -> None:
    run.data.sources["b"].max_epochs = 100
    source = run.data.sources["a"]
    for name, steps in (("short", 4), ("long", 9), ("last", 1)):  # sources begin their second and third epoch
        stage = run.curriculum.stages[name]
        stage.tokens, stage.mix = steps * stage.batch_tokens, {"a": 1.0}
    make_corpus(Path(source.path).parent / "few", natural_lengths(80, largest=700))
    source.path = str(Path(source.path).parent / "few")
    source.max_epochs = before

    def text(kept: dict[str, Any] | None) -> object:
        try:
            return told(opened(run, "long", kept), step)
        except ConfigError:
            return "too little text"

    kept = kept_at(run, "long", step)
    source.max_epochs = after
    run.resume.override = ["data"]
    assert text(kept) == text(None)
    if after > before and before % 1 == 0:  # as k3train/config/compare.py accepts it
        run.resume.override = []
        assert text(kept) == text(None)


@pytest.mark.parametrize(
    "damage",
    [
        {},
        {"stage": "long"},
        {"mark": None},
        {"mark": {}},
        {"decided_by": None},
        {"decided_by": {"data": {"sources": {"a": 1}}}},
    ],
)
def test_a_bookmark_of_another_form_is_left_alone(
    run: Run, damage: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    kept = {**kept_at(run, "long", 5), **damage} if damage else {"anything": 1}
    if "stage" in damage:
        del kept["mark"]
    assert told(opened(run, "long", kept), 0) == told(opened(run, "long"), 0)
    assert "cannot be read" in caplog.text
