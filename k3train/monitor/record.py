"""What a run says about itself: one record a step, an evaluation or an event."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One step. Numbers are global: over all ranks, as of the end of the step."""

    kind: ClassVar[str] = "step"
    step: int
    """Steps of the run so far, this one and skipped ones included."""
    tokens: int
    """Tokens of the run so far, padding and all."""
    progress: float
    """Share of the run's tokens that are done, 0 to 1."""
    stage: str
    loss: float
    """Mean next-token loss per predicted token, in nats; comparable with that of an evaluation."""
    grad_norm: float
    """Global L2 norm before clipping."""
    learning_rate: float
    tokens_per_second: float
    """Tokens of this step over step_seconds."""
    step_seconds: float
    """From the end of the step before (or of a pause) to the end of this one; data wait included."""
    data_wait_seconds: float
    """Part of step_seconds in which training stood still for data."""
    model_tflops: float | None = None
    """TFLOP/s of each rank, which has a GPU of its own: the model's arithmetic over step_seconds, as
    ``k3train/monitor/flops.py`` counts it, attention within documents and recomputation left out. None for a
    step that was left out without being computed."""
    mfu: float | None = None
    """model_tflops over the dense bf16 peak of the device, 0 to 1, whatever the model's precision; None on
    all but H100 and H200."""
    padding: float | None = None
    """Share of this step's tokens that are padding, 0 to 1; None for a step that was left out."""
    mtp_loss: float | None = None
    """Mean loss of the token after next, in nats and without its weight; None without MTP."""
    router_max_violation: float | None = None
    """Worst layer's (busiest expert's load) / (mean load) - 1; None without experts."""
    router_cv: float | None = None
    """Worst layer's coefficient of variation of expert load."""
    dead_experts: int | None = None
    """Experts of all layers that received no token in this step."""
    max_logit: float | None = None
    """Largest attention logit of MLA in this step, before QK-Clip; None without QK-Clip."""
    memory_gib: float | None = None
    """Largest device memory in use on any rank, from the start of the run to the end of this step's backward
    pass; None on the CPU."""
    eta_stage_seconds: float | None = None
    """Expected time to the end of the stage; None before a speed is known."""
    eta_run_seconds: float | None = None
    """Expected time to the end of the run at the present speed."""
    slowest_rank: int | None = None
    """The rank with the most time of its own, in steps that measure it."""
    slowest_ratio: float | None = None
    """Its own time over that of its peers."""
    skipped: bool = False
    """The step was bad, or left out for an earlier one: parameters were left alone."""
    skipped_steps: int = 0
    """Steps of the run so far that left parameters alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalRecord:
    """One evaluation of one held-out set at one context length."""

    kind: ClassVar[str] = "eval"
    step: int
    tokens: int
    stage: str
    heldout: str
    """Name of the held-out set."""
    context_tokens: int
    loss: float
    """Mean loss per predicted token, in nats."""
    predicted_tokens: int
    """Over how many tokens the mean was taken."""
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceRecord:
    """How evenly tokens reached the experts of each layer in one step."""

    kind: ClassVar[str] = "balance"
    step: int
    tokens: int
    stage: str
    layers: list[int]
    """Layer numbers, from 1; the MTP layer comes last."""
    values: dict[str, list[float]]
    """One number a layer; ``k3train/router/metrics.py`` says what each name means."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EventRecord:
    """Something that happened once: a stage began, a checkpoint was written, the run resumed."""

    kind: ClassVar[str] = "event"
    step: int
    tokens: int
    event: str
    """stage_start, stage_end, checkpoint, resume, stop, or another name the caller chooses."""
    detail: dict[str, Any] = field(default_factory=dict)
    """JSON data."""


Record = StepRecord | EvalRecord | BalanceRecord | EventRecord


def to_json(record: Record, attempt: int) -> dict[str, Any]:
    """The record as JSON data with its kind and the attempt that wrote it."""
    return {"kind": record.kind, "attempt": attempt, **asdict(record)}
