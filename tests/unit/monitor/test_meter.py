"""Step times, throughput and ETA, on a clock the test moves."""

from __future__ import annotations

import pytest

from k3train.monitor.meter import WINDOW_STEPS, Meter


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def take_step(meter: Meter, clock: Clock, *, seconds: float, tokens: int = 100) -> None:
    clock.now += seconds
    meter.finish_step(tokens)


def test_a_step_has_its_time_its_wait_and_its_throughput(clock: Clock) -> None:
    meter = Meter(clock)
    meter.start()
    with meter.data_wait():
        clock.now += 0.5
    clock.now += 1.5
    timing = meter.finish_step(4000)
    assert (timing.step_seconds, timing.data_wait_seconds, timing.tokens_per_second) == (2.0, 0.5, 2000.0)
    clock.now += 1.0
    assert meter.finish_step(4000).data_wait_seconds == 0.0


def test_a_pause_belongs_to_no_step(clock: Clock) -> None:
    meter = Meter(clock)
    meter.start()
    clock.now += 1.0
    with meter.pause():
        clock.now += 100.0
    clock.now += 1.0
    assert meter.finish_step(10).step_seconds == 2.0
    with meter.pause():
        clock.now += 100.0
    clock.now += 3.0
    assert meter.finish_step(10).step_seconds == 3.0


def test_a_pause_that_raises_is_still_a_pause(clock: Clock) -> None:
    meter = Meter(clock)
    meter.start()

    def fail() -> None:
        with meter.pause():
            clock.now += 100.0
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    clock.now += 1.0
    assert meter.finish_step(10).step_seconds == 1.0


def test_eta_is_unknown_at_first_then_follows_recent_steps(clock: Clock) -> None:
    meter = Meter(clock)
    meter.start()
    assert meter.eta_seconds(1000) is None
    take_step(meter, clock, seconds=2.0)
    assert meter.eta_seconds(1000) == 20.0
    for _ in range(WINDOW_STEPS):
        take_step(meter, clock, seconds=1.0)
    assert meter.eta_seconds(1000) == 10.0
    assert meter.eta_seconds(0) == 0.0


def test_a_new_stage_forgets_the_old_speed(clock: Clock) -> None:
    meter = Meter(clock)
    take_step(meter, clock, seconds=2.0)
    clock.now += 50.0
    meter.start()
    assert meter.eta_seconds(1000) is None
    take_step(meter, clock, seconds=8.0)
    assert meter.eta_seconds(1000) == 80.0


def test_a_clock_that_stands_still_gives_no_infinity(clock: Clock) -> None:
    meter = Meter(clock)
    assert meter.finish_step(100).tokens_per_second == 0.0
