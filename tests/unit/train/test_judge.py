"""Which losses and gradient norms are taken for bad, and who is named slow or hung."""

from __future__ import annotations

import json
import math
import random

import pytest

from k3train.config.schema import Guards, OnNonFinite, OnSpike
from k3train.parallel.layout import Layout
from k3train.train.guards import MIN_HISTORY, Action, GuardState, judge, overruled
from k3train.train.left_out import LeftOut
from k3train.train.stragglers import IN_A_ROW, Pace, Slowest, slowest
from k3train.train.watchdog import Report, who_is_behind


def curve(step: int, rng: random.Random) -> tuple[float, float]:
    """Loss and gradient norm of a healthy run: falling, noisy, the norm with a heavy tail."""
    loss = 2.5 + 6 * math.exp(-step / 300) + rng.gauss(0, 0.06)
    return loss, 0.4 * math.exp(rng.gauss(0, 0.25)) * (1 + 2 * math.exp(-step / 100))


def test_no_false_alarm_in_ten_thousand_steps_and_none_missed() -> None:
    rng, state, settings = random.Random(7), GuardState(), Guards(spike=OnSpike.skip)
    for step in range(10_000):
        loss, norm = curve(step, rng)
        assert judge(settings, state, loss, norm) is None, (step, loss, norm)
        if step >= MIN_HISTORY and step % 50 == 0:
            worse = judge(settings, state, loss * 3, norm)
            assert worse is not None
            assert (worse.quantity, worse.action) == ("loss", Action.skip)
            exploded = judge(settings, state, loss, norm * 1000)
            assert exploded is not None
            assert exploded.quantity == "gradient norm"
        state.updated(loss, norm, settings.spike_window_steps)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nonfinite_is_found_from_the_first_step_on(value: float) -> None:
    state = GuardState()
    for loss, norm, quantity in ((value, 1.0, "loss"), (1.0, value, "gradient norm")):
        found = judge(Guards(nonfinite=OnNonFinite.skip, spike=OnSpike.off), state, loss, norm)
        assert found is not None
        assert (found.kind, found.quantity, found.action) == ("nonfinite", quantity, Action.skip)
    stopped = judge(Guards(), state, value, 1.0)
    assert stopped is not None
    assert stopped.action is Action.stop


@pytest.mark.parametrize("spike", OnSpike)
def test_no_step_that_came_out_differently_is_an_update(spike: OnSpike) -> None:
    state = GuardState(losses=[1.0] * MIN_HISTORY, norms=[1.0] * MIN_HISTORY)
    found = judge(Guards(spike=spike), state, 1.0, 1e6)
    after = overruled(found, judge(Guards(spike=spike), state, 1.0, 1e5), 1.0)
    assert after.kind == ("replay" if spike is OnSpike.off else "spike")
    keeps = spike in (OnSpike.skip, OnSpike.rollback)
    assert after.action is (Action(spike.value) if keeps else Action.stop)


@pytest.mark.parametrize("spike", [OnSpike.skip, OnSpike.rollback])
def test_no_batch_is_left_out_that_is_fine_when_it_is_computed_again(spike: OnSpike) -> None:
    guards = Guards(nonfinite=OnNonFinite.skip, spike=spike)
    state = GuardState(losses=[1.0] * MIN_HISTORY, norms=[1.0] * MIN_HISTORY)
    fine = judge(guards, state, 1.0, 1.0)
    assert fine is None
    for norm in (1e6, math.nan):
        assert overruled(judge(guards, state, 1.0, norm), fine, 1.0).action is Action.stop


def test_what_a_checkpoint_keeps_decides_the_same_and_a_stage_starts_anew() -> None:
    state = GuardState(left_out=[LeftOut(3, 5, "rollback")])
    state.enter_stage("short")
    rng = random.Random(1)
    for step in range(20):
        state.updated(*curve(step, rng), window=8)
    again = GuardState.from_json(json.loads(json.dumps(state.to_json())))
    assert again == state
    assert len(again.losses) == 8
    assert [again.why_left_out(step) for step in (2, 3, 5, 6)] == [None, "rollback", "rollback", None]
    assert judge(Guards(), again, 30.0, 1.0) is not None
    again.enter_stage("short")
    assert len(again.losses) == 8
    again.enter_stage("long")
    assert judge(Guards(), again, 30.0, 1.0) is None


def layout(pp: int, dp: int) -> Layout:
    return Layout(world=pp * dp, tp=1, pp=pp, vp=1, cp=1, ep=1, etp=1, dp=dp, pipeline_split=tuple([1] * pp))


def test_ranks_are_compared_with_their_own_place_in_the_pipeline() -> None:
    # The last stage has more to do: only rank 1 is slow for its place.
    found = slowest(layout(pp=2, dp=3), [1.0, 1.8, 1.1, 2.0, 2.1, 2.0])
    assert (found.rank, round(found.ratio, 2)) == (1, 1.71)
    assert slowest(layout(pp=2, dp=1), [1.0, 3.0]).rank == 1


def test_a_slow_rank_is_named_once_and_only_when_it_stays_slow() -> None:
    pace = Pace(every_steps=1, ratio=1.5)
    slow, other = Slowest(rank=1, ratio=2.0, seconds=1.0), Slowest(rank=0, ratio=2.0, seconds=1.0)
    fine, tiny = Slowest(rank=1, ratio=1.4, seconds=1.0), Slowest(rank=1, ratio=2.0, seconds=0.01)
    measured = [slow, slow, fine, slow, other, slow, slow, tiny, *([slow] * (IN_A_ROW + 2))]
    assert [pace.judge(each).named for each in measured] == [False] * 10 + [True, False, False]


def report(rank: int, *, sections: int = 9, waits: bool = True) -> Report:
    return Report(
        rank=rank, host="n", sections=sections, section="step", step=4, seconds=9, waits=waits, where="x:1"
    )


def test_hung_rank_is_told_from_those_that_wait_for_it() -> None:
    waiting = [report(0), report(2), report(3)]
    assert who_is_behind([*waiting, report(1, waits=False)], 4).startswith("rank 1 on n")
    assert who_is_behind([*waiting, report(1, sections=8)], 4).startswith("rank 1 on n")
    # One rank still saves while another, further on, computes: the former is behind.
    both = [report(0, waits=False), report(1, sections=8, waits=False)]
    assert who_is_behind(both, 2).startswith("rank 1 on n")
    assert who_is_behind(waiting, 4).startswith("rank 1 did not answer")
    assert who_is_behind(waiting[:2], 4).startswith("ranks 1, 3 did not answer")
    assert who_is_behind([report(0), report(1)], 2).startswith("no rank stands out")
