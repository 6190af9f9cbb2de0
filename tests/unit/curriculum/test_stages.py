"""The stage table: boundaries, steps and what lies on a boundary."""

from __future__ import annotations

import pytest

from k3train.config.schema import Curriculum, Run, Stage
from k3train.curriculum.stages import stage_at, stage_table, total_tokens

RUN = Run(
    curriculum=Curriculum(
        stages={
            "long": Stage(context_tokens=64, tokens=512, batch_tokens=256),
            "short": Stage(context_tokens=16, tokens=320, batch_tokens=32),
        },
        order=["short", "long"],
    )
)
TABLE = stage_table(RUN)


def test_order_decides_not_the_mapping() -> None:
    assert [(plan.name, plan.index) for plan in TABLE] == [("short", 0), ("long", 1)]


def test_stages_join_without_gap() -> None:
    short, long = TABLE
    assert (short.start_tokens, short.end_tokens, short.start_step, short.steps) == (0, 320, 0, 10)
    assert (long.start_tokens, long.end_tokens, long.start_step, long.steps) == (320, 832, 10, 2)
    assert (short.sequences_per_step, long.sequences_per_step) == (2, 4)
    assert long.end_step == 12
    assert total_tokens(TABLE) == 832


@pytest.mark.parametrize(
    ("tokens", "name"), [(0, "short"), (319, "short"), (320, "long"), (831, "long"), (832, "long")]
)
def test_stage_of_the_next_token(tokens: int, name: str) -> None:
    assert stage_at(TABLE, tokens).name == name


@pytest.mark.parametrize("tokens", [-1, 833])
def test_outside_the_run(tokens: int) -> None:
    with pytest.raises(ValueError, match="outside the run"):
        stage_at(TABLE, tokens)
