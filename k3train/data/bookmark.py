"""A place in a run's text that a checkpoint keeps: with it a start plans nothing of what lies before.

It holds only where planning from the beginning would lead to the same place, so all that decided the text
before it is kept beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from k3train.config.schema import Run
from k3train.curriculum.stages import StagePlan
from k3train.data.indexed import CorpusError
from k3train.data.mix import Drawing, Position, Stream
from k3train.data.plan import FORMAT, Mark, changed
from k3train.data.weights import stage_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the text goes on: ``mark`` lies in ``stage``."""

    stage: StagePlan
    mark: Mark


def bookmark(
    run: Run, table: Sequence[StagePlan], stage: StagePlan, streams: dict[str, Stream], mark: Mark
) -> dict[str, Any]:
    """Plain values for a checkpoint of a run that stands in the window of ``mark``."""
    return {
        "stage": stage.name,
        "mark": mark.values(),
        "decided_by": _decided_by(run, table, stage, streams),
    }


def find_place(
    kept: dict[str, Any],
    run: Run,
    table: Sequence[StagePlan],
    stage: StagePlan,
    streams: dict[str, Stream],
) -> Place | None:
    """The place of a ``kept`` bookmark, in ``stage`` or one before; None when all must be planned again.

    That is so when the bookmark has not the form of this k3train's, and when something that decided the text
    before it is another now and ``resume.override`` accepts that. Without that a CorpusError names it.
    """
    try:
        place, names = _read(kept, run, table, stage, streams)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        logger.warning("the checkpoint's place in the text cannot be read (%r): planned again", error)
        return None
    if not names:
        return place
    told = f"{', '.join(names)} changed since the checkpoint"
    if not may_move_text(run):
        raise CorpusError(
            f"this run would not go on with the text that it was trained on: {told}; restore the old value, "
            f"start another run with another name, or accept it with resume.override=[{','.join(names)}]."
        )
    logger.warning("%s: all text before it is planned again", told)
    return None


def may_move_text(run: Run) -> bool:
    """Whether ``resume.override`` accepts a change of what decides the order of the text."""
    return any(group.partition(".")[0] in ("seed", "data", "curriculum") for group in run.resume.override)


def _read(
    kept: dict[str, Any],
    run: Run,
    table: Sequence[StagePlan],
    stage: StagePlan,
    streams: dict[str, Stream],
) -> tuple[Place | None, list[str]]:
    """The bookmark's place, and what has changed before it."""
    mark = _with_streams(Mark.of(kept["mark"]), streams)
    plan = next((plan for plan in table[: stage.index + 1] if plan.name == kept["stage"]), None)
    if plan is None:
        return None, ["curriculum.order"]
    before, now = kept["decided_by"], _decided_by(run, table, plan, streams)
    names = changed(_without_far_epochs(before, now, mark), now)
    if mark.first_sequence >= plan.steps * plan.sequences_per_step:
        names.append(f"curriculum.stages.{plan.name}.tokens")
    return Place(plan, mark), names


def _decided_by(
    run: Run, table: Sequence[StagePlan], stage: StagePlan, streams: dict[str, Stream]
) -> dict[str, Any]:
    """All that decides the text up to any place in ``stage``, under the keys of the settings. Where a text
    lies does not count: its fingerprint stands for it."""
    begun = table[: stage.index + 1]
    mixes = {plan.name: stage_weights(run, plan, streams) for plan in begun}
    stages: dict[str, dict[str, Any]] = {
        plan.name: {
            "context_tokens": plan.stage.context_tokens,
            "batch_tokens": plan.stage.batch_tokens,
            "mix": mixes[plan.name],
            # The stage that is being trained may become longer, or end where it stands.
            **({} if plan is begun[-1] else {"tokens": plan.stage.tokens}),
        }
        for plan in begun
    }
    return {
        "format": FORMAT,
        "seed": run.seed,
        "data": {
            "pack_window_tokens": run.data.pack_window_tokens,
            "sources": {
                name: {
                    "path": streams[name].corpus_fingerprint,
                    "min_document_tokens": run.data.sources[name].min_document_tokens,
                    "max_epochs": run.data.sources[name].max_epochs,
                }
                for name in sorted({name for mix in mixes.values() for name in mix})
            },
        },
        "curriculum": {"order": [plan.name for plan in begun], "stages": stages},
    }


def _without_far_epochs(before: dict[str, Any], now: dict[str, Any], mark: Mark) -> dict[str, Any]:
    """``before`` with the max_epochs of ``now`` where both allow all of every epoch that had begun at the
    mark: they differ only in what comes after it."""
    sources = dict(before["data"]["sources"])
    for name, source in now["data"]["sources"].items():
        begun = mark.drawing.positions[name].epoch + 1
        if name in sources and min(sources[name]["max_epochs"], source["max_epochs"]) >= begun:
            sources[name] = {**sources[name], "max_epochs": source["max_epochs"]}
    return {**before, "data": {**before["data"], "sources": sources}}


def _with_streams(mark: Mark, streams: dict[str, Stream]) -> Mark:
    """The mark for sources of today: one that the run did not have stands at its beginning."""

    def today(at: dict[str, Position]) -> dict[str, Position]:
        return {name: at.get(name, Position()) for name in streams}

    drawing = Drawing(mark.drawing.target, mark.drawing.drawn, today(mark.drawing.positions))
    return replace(mark, start=today(mark.start), drawing=drawing)
