"""Notices when the next stage's context length gets worse while a stage trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from k3train.monitor.metrics_file import read_records
from k3train.monitor.record import EvalRecord


class AheadWatch:
    """The latest loss of each held-out set at each context length."""

    def __init__(self) -> None:
        self._latest: dict[tuple[str, int], tuple[int, float]] = {}

    def read(self, metrics: Path, step: int) -> None:
        """Take up what earlier starts of the run have measured, up to ``step``."""
        for record in read_records(metrics):
            if record["kind"] == EvalRecord.kind and record["step"] <= step:
                key = (record["heldout"], record["context_tokens"])
                self._latest[key] = (record["step"], record["loss"])

    def worse(self, record: EvalRecord, trained_context: int) -> dict[str, Any] | None:
        """What to warn of: a context longer than ``trained_context`` whose loss is higher than at its last
        evaluation, in nats; None when there is nothing to warn of."""
        key = (record.heldout, record.context_tokens)
        before = self._latest.get(key)
        self._latest[key] = (record.step, record.loss)
        if before is None or record.context_tokens <= trained_context or not record.loss > before[1]:
            return None
        return {
            "heldout": record.heldout,
            "context_tokens": record.context_tokens,
            "loss": round(record.loss, 4),
            "loss_before": round(before[1], 4),
            "step_before": before[0],
        }
