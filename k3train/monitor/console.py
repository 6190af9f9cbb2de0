"""One plain line per record, readable in a terminal and in a log file."""

from __future__ import annotations

from typing import TextIO

from k3train.monitor.record import BalanceRecord, EvalRecord, EventRecord, Record, StepRecord

MUCH_PADDING = 0.05
"""Share of a step's tokens from which the console tells it; packing alone leaves less."""


def line(record: StepRecord | EvalRecord | EventRecord) -> str:
    """The record as one line of text."""
    match record:
        case StepRecord():
            return _step_line(record)
        case EvalRecord():
            where = f"{record.heldout} at {record.context_tokens} tokens"
            how = f"{record.predicted_tokens} tokens, {record.seconds:.1f} s"
            return f"eval  {record.stage} step {record.step} {where}: loss {record.loss:.4f} ({how})"
        case EventRecord():
            told = ((key, _brief(value)) for key, value in record.detail.items())
            detail = " ".join(f"{key}={value}" for key, value in told if value)
            return (
                f"event {record.event} at step {record.step}, {count(record.tokens)} tokens {detail}".rstrip()
            )


class Console:
    """Prints every ``every_steps``-th step, every skipped step, and all evaluations and events."""

    def __init__(self, stream: TextIO, every_steps: int) -> None:
        self._stream, self._every = stream, max(1, every_steps)

    def write(self, record: Record) -> None:
        """Print the record if it is due."""
        if isinstance(record, BalanceRecord):  # the step's line has the worst of it
            return
        if isinstance(record, StepRecord) and record.step % self._every and not record.skipped:
            return
        print(line(record), file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing to close."""


def count(number: float) -> str:
    """A count with three digits and a unit: 950, 12.3k, 4.20M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= 0.9995 * size:
            return f"{number / size:#.3g}".rstrip(".") + unit
    return f"{number:.0f}"


def duration(seconds: float | None) -> str:
    """Hours, minutes and seconds; days in front when there are any; ? when unknown."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days}d " if days else "") + f"{hours}:{minutes:02d}:{rest:02d}"


def _brief(value: object) -> str:
    """A detail as one word: of a mapping what exceeds one, such as dp2,ep2; nothing for what is absent."""
    if isinstance(value, dict):
        return ",".join(f"{key}{each}" for key, each in value.items() if isinstance(each, int) and each > 1)
    return "" if value is None else str(value)


def _step_line(record: StepRecord) -> str:
    wait = 100 * record.data_wait_seconds / record.step_seconds if record.step_seconds > 0 else 0.0
    parts = [
        f"{100 * record.progress:5.1f}%",
        record.stage,
        f"step {record.step}",
        f"loss {record.loss:.4f}",
        f"norm {record.grad_norm:.3f}",
        f"lr {record.learning_rate:.2e}",
        f"{count(record.tokens_per_second)} tok/s",
    ]
    if record.model_tflops is not None:
        parts.append(f"{record.model_tflops:.3g} TFLOP/s")
    if record.mfu is not None:
        parts.append(f"mfu {100 * record.mfu:.1f}%")
    parts.append(f"wait {wait:.0f}%")
    if record.padding is not None and record.padding > MUCH_PADDING:
        parts.append(f"padding {100 * record.padding:.0f}%")
    if record.mtp_loss is not None:
        parts.insert(4, f"mtp {record.mtp_loss:.4f}")
    if record.router_max_violation is not None:
        parts.append(f"imbalance {record.router_max_violation:.2f}")
    if record.dead_experts:
        parts.append(f"dead {record.dead_experts}")
    if record.max_logit is not None:
        parts.append(f"logit {record.max_logit:.1f}")
    if record.memory_gib is not None:
        parts.append(f"mem {record.memory_gib:.1f} GiB")
    parts.append(f"eta {duration(record.eta_stage_seconds)} stage, {duration(record.eta_run_seconds)} run")
    if record.skipped:
        parts.append(f"SKIPPED ({record.skipped_steps} so far)")
    return "  ".join(parts)
