"""The learning rate: exact at the ends, continuous where it should be, a function of tokens alone."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3train.config.schema import Optim, Run, Schedule, Stage, StageLearningRate
from k3train.curriculum.stages import stage_table
from k3train.optim.schedule import learning_rate

BATCH = 1000


def make(schedule: Schedule, *, second: StageLearningRate | None = None, **optim: float) -> tuple[Run, list]:
    run = Run(optim=Optim(schedule=schedule, learning_rate=1e-2, min_learning_rate=1e-3, **optim))  # type: ignore
    for name, own in (("first", None), ("second", second)):
        run.curriculum.stages[name] = Stage(context_tokens=100, tokens=60 * BATCH, batch_tokens=BATCH)
        if own is not None:
            run.curriculum.stages[name].learning_rate = own
    run.curriculum.order = ["first", "second"]
    return run, stage_table(run)


@pytest.mark.parametrize("schedule", list(Schedule))
def test_the_ends_are_exact(schedule: Schedule) -> None:
    run, table = make(schedule, warmup_fraction=0.1)
    assert learning_rate(run, table, 0) == 0.0
    assert learning_rate(run, table, 12 * BATCH) == 1e-2
    assert learning_rate(run, table, 120 * BATCH) == (1e-2 if schedule is Schedule.constant else 1e-3)


@pytest.mark.parametrize("schedule", list(Schedule))
def test_without_warm_up_it_starts_at_the_peak(schedule: Schedule) -> None:
    run, table = make(schedule, warmup_fraction=0.0)
    assert learning_rate(run, table, 0) == 1e-2


@pytest.mark.parametrize("schedule", list(Schedule))
def test_a_stage_change_does_not_restart_or_jump(schedule: Schedule) -> None:
    run, table = make(schedule, warmup_fraction=0.05, decay_fraction=0.7)
    rates = [learning_rate(run, table, t * 250) for t in range(480)]
    steps = [abs(b - a) for a, b in itertools.pairwise(rates)]
    assert max(steps) <= 1e-2 / 24 * (1 + 1e-9)  # the warm-up, 24 points long, is the steepest part
    after = rates[24:]
    assert after == sorted(after, reverse=True)


def test_cosine_is_half_way_in_the_middle() -> None:
    run, table = make(Schedule.cosine, warmup_fraction=0.0)
    assert learning_rate(run, table, 60 * BATCH) == pytest.approx(5.5e-3, rel=1e-12)


def test_wsd_is_flat_then_linear() -> None:
    run, table = make(Schedule.wsd, warmup_fraction=0.1, decay_fraction=0.25)
    assert {learning_rate(run, table, t * BATCH) for t in range(12, 91)} == {1e-2}
    assert learning_rate(run, table, 105 * BATCH) == pytest.approx(5.5e-3, rel=1e-12)


def test_a_stage_peak_holds_in_its_stage_only() -> None:
    run, table = make(Schedule.constant, warmup_fraction=0.0, second=StageLearningRate(peak=4e-3))
    assert learning_rate(run, table, 60 * BATCH) == 1e-2  # the boundary belongs to the stage that ends
    assert learning_rate(run, table, 61 * BATCH) == 4e-3
    assert learning_rate(run, table, 120 * BATCH) == 4e-3


def test_rewarm_up_rises_from_the_floor_and_meets_the_schedule() -> None:
    own = StageLearningRate(warmup_tokens=10 * BATCH)
    run, table = make(Schedule.cosine, warmup_fraction=0.0, second=own)
    plain, plain_table = make(Schedule.cosine, warmup_fraction=0.0)
    rates = [learning_rate(run, table, t * BATCH) for t in range(121)]
    expected = [learning_rate(plain, plain_table, t * BATCH) for t in range(121)]
    assert rates[:61] == expected[:61]
    assert rates[70:] == expected[70:]
    assert rates[61:71] == sorted(rates[61:71])
    assert 1e-3 < rates[61] < 2e-3


def test_a_higher_peak_after_decay_is_reached_without_a_jump() -> None:
    own = StageLearningRate(peak=1e-2, warmup_tokens=20 * BATCH)
    run, table = make(Schedule.constant, warmup_fraction=0.0, second=own)
    run.optim.learning_rate = 5e-4  # below min_learning_rate: the first stage ends at 5e-4
    rates = [learning_rate(run, table, t * BATCH) for t in range(60, 81)]
    assert rates[0] == 5e-4
    assert rates[20] == 1e-2
    assert max(b - a for a, b in itertools.pairwise(rates)) == pytest.approx(9.5e-3 / 20)


@pytest.mark.parametrize("tokens", [-1, 120 * BATCH + 1])
def test_outside_the_run_is_an_error(tokens: int) -> None:
    run, table = make(Schedule.cosine)
    with pytest.raises(ValueError, match=str(tokens)):
        learning_rate(run, table, tokens)


@given(
    schedule=st.sampled_from(list(Schedule)),
    warmup=st.floats(0, 1),
    decay=st.floats(0, 1),
    rewarm=st.integers(0, 60 * BATCH),
    peak=st.none() | st.floats(1e-6, 1.0),
    tokens=st.integers(0, 120 * BATCH),
)
def test_it_stays_between_zero_and_the_highest_peak(
    schedule: Schedule, warmup: float, decay: float, rewarm: int, peak: float | None, tokens: int
) -> None:
    own = StageLearningRate(peak=peak, warmup_tokens=rewarm)
    run, table = make(schedule, second=own, warmup_fraction=warmup, decay_fraction=decay)
    rate = learning_rate(run, table, tokens)
    assert 0.0 <= rate <= max(1e-2, peak or 0.0) * (1 + 1e-12)
    assert rate == learning_rate(run, table, tokens)
