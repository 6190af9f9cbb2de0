"""The console line."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from k3train.monitor.console import Console, count, duration, line
from k3train.monitor.record import EvalRecord, EventRecord, StepRecord

STEP = StepRecord(
    step=120,
    tokens=480_000,
    progress=0.1234,
    stage="long",
    loss=3.45678,
    grad_norm=0.5123,
    learning_rate=1.987e-3,
    tokens_per_second=12_345.0,
    step_seconds=0.5,
    model_tflops=312.34,
    mfu=0.3158,
    data_wait_seconds=0.01,
    router_max_violation=0.25,
    router_cv=0.1,
    dead_experts=0,
    memory_gib=3.14,
    eta_stage_seconds=723,
    eta_run_seconds=100_000,
)


def test_a_step_says_everything_on_one_plain_line() -> None:
    assert line(STEP) == (
        " 12.3%  long  step 120  loss 3.4568  norm 0.512  lr 1.99e-03  12.3k tok/s  312 TFLOP/s  mfu 31.6%  "
        "wait 2%  imbalance 0.25  mem 3.1 GiB  eta 0:12:03 stage, 1d 3:46:40 run"
    )


def test_what_is_unknown_is_left_out() -> None:
    unknown = dict.fromkeys(
        ("router_max_violation", "memory_gib", "model_tflops", "mfu", "eta_stage_seconds")
    )
    text = line(replace(STEP, **unknown))
    assert "FLOP" not in text
    assert "mfu" not in text
    assert "imbalance" not in text
    assert "mem" not in text
    assert "eta ? stage" in text


def test_padding_is_told_where_it_is_much() -> None:
    assert "padding" not in line(replace(STEP, padding=0.04))
    assert "  padding 75%  " in line(replace(STEP, padding=0.751))


def test_a_skipped_step_and_dead_experts_stand_out() -> None:
    text = line(replace(STEP, skipped=True, loss=float("nan"), grad_norm=float("inf"), dead_experts=3))
    assert "SKIPPED" in text
    assert "loss nan  norm inf" in text
    assert "dead 3" in text


def test_evaluations_and_events() -> None:
    record = EvalRecord(
        step=3,
        tokens=30,
        stage="one",
        heldout="books",
        context_tokens=64,
        loss=2.5,
        predicted_tokens=99,
        seconds=1.25,
    )
    assert line(record) == "eval  one step 3 books at 64 tokens: loss 2.5000 (99 tokens, 1.2 s)"
    event = EventRecord(step=3, tokens=30_000, event="checkpoint", detail={"path": "step_00000003"})
    assert line(event) == "event checkpoint at step 3, 30.0k tokens path=step_00000003"
    start = replace(
        event, event="stage_start", detail={"layout": {"dp": 2, "tp": 1, "ep": 2}, "loaded": None}
    )
    assert line(start) == "event stage_start at step 3, 30.0k tokens layout=dp2,ep2"


def test_only_due_steps_are_printed_but_never_lose_a_skip() -> None:
    stream = io.StringIO()
    console = Console(stream, every_steps=10)
    for step in (9, 10, 11):
        console.write(replace(STEP, step=step))
    console.write(replace(STEP, step=12, skipped=True))
    console.write(EventRecord(step=13, tokens=0, event="stop"))
    steps = [text for text in stream.getvalue().splitlines() if "step 1" in text]
    assert [text.split("step ")[1].split()[0].strip(",") for text in steps] == ["10", "12", "13"]
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (999.9, "1.00k"),
        (12_345, "12.3k"),
        (123_456, "123k"),
        (4.2e6, "4.20M"),
        (5e12, "5.00T"),
    ],
)
def test_counts(number: float, text: str) -> None:
    assert count(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "?"), (0, "0:00:00"), (59.6, "0:01:00"), (3600, "1:00:00"), (90_061, "1d 1:01:01")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text
