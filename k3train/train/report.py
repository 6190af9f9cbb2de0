"""What the loop tells the monitor, and when."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from k3train.checkpoint.load import read_train_state
from k3train.config.schema import Run
from k3train.curriculum.stages import StagePlan, total_tokens
from k3train.kernels.describe import describe_kernels
from k3train.monitor.ahead import AheadWatch
from k3train.monitor.alarms import AlarmBell
from k3train.monitor.flops import bf16_peak, model_tflops
from k3train.monitor.meter import Meter
from k3train.monitor.metrics_file import METRICS
from k3train.monitor.monitor import open_monitor
from k3train.monitor.record import BalanceRecord, EvalRecord, StepRecord
from k3train.plan.borders import pipeline_bytes
from k3train.train.balance import Balance
from k3train.train.evaluate import HeldoutLoss
from k3train.train.guards import Action
from k3train.train.progress import Progress, is_due
from k3train.train.resume import record_start
from k3train.train.setup import StageSetup
from k3train.train.step import StepResult
from k3train.train.verdict import Verdict


class Report:
    """Turns what happens into records. Every rank has one; rank 0's writes."""

    def __init__(self, run: Run, table: list[StagePlan]) -> None:
        self.meter = Meter()
        self._first_rank = dist.get_rank() == 0
        self._monitor = open_monitor(run, writes=self._first_rank)
        self._ahead = AheadWatch()
        self._total_tokens = total_tokens(table)
        self._kernels: dict[str, str] = {}
        self._bell = AlarmBell(run.monitor.balance.alarms)

    def run_started(self, run: Run, progress: Progress, latest: Path | None) -> None:
        """Training starts, or goes on from ``latest``."""
        if self._first_rank:
            self._ahead.read(Path(run.dir) / METRICS, progress.step)
            state = None if latest is None else read_train_state(latest)
            self._event("start", progress, **record_start(run, progress, state))

    def stage_started(self, setup: StageSetup, progress: Progress, latest: Path | None) -> None:
        """A stage is built and about to train."""
        layout, stage = setup.groups.layout, setup.plan.stage
        degrees = {name: getattr(layout, name) for name in ("dp", "tp", "pp", "vp", "cp", "ep", "etp")}
        resumed = latest is not None and progress.tokens > setup.plan.start_tokens
        self._event(
            "resume" if resumed else "stage_start",
            progress,
            stage=setup.plan.name,
            context_tokens=stage.context_tokens,
            batch_tokens=stage.batch_tokens,
            layout=degrees,
            pipeline=pipeline_bytes(
                setup.run.model, layout, stage.context_tokens * stage.micro_batch_sequences
            ),
            loaded=None if latest is None else str(latest),
        )
        kernels = describe_kernels(setup.run.model, setup.device)
        if kernels != self._kernels:
            self._kernels = kernels
            self._event("kernels", progress, **kernels)
        self.meter.start()

    def step(self, setup: StageSetup, progress: Progress, result: StepResult) -> None:
        """A step is done, or was refused."""
        if result.verdict is not None:
            self._found(progress, result.verdict)
        if result.action in (Action.stop, Action.rollback):
            return
        slowest = result.slowest
        if slowest is not None and slowest.named:
            told = f"{slowest.ratio:.1f} times its peers' {slowest.seconds / slowest.ratio:.2f} s"
            self._event("straggler", progress, rank=slowest.rank, own_seconds=slowest.seconds, found=told)
        timing = self.meter.finish_step(setup.plan.stage.batch_tokens)
        balance = result.balance
        tflops = _model_tflops(setup, result, timing.step_seconds)
        peak = bf16_peak(_device_name(setup.device))
        self._monitor.write(
            StepRecord(
                step=progress.step,
                tokens=progress.tokens,
                progress=progress.tokens / self._total_tokens,
                stage=setup.plan.name,
                loss=result.loss,
                mtp_loss=result.mtp_loss,
                grad_norm=result.grad_norm,
                learning_rate=result.learning_rate,
                tokens_per_second=timing.tokens_per_second,
                step_seconds=timing.step_seconds,
                data_wait_seconds=timing.data_wait_seconds,
                model_tflops=tflops,
                mfu=tflops * 1e12 / peak if tflops is not None and peak is not None else None,
                padding=result.padding,
                router_max_violation=balance.worst("max_violation") if balance else None,
                router_cv=balance.worst("load_cv") if balance else None,
                dead_experts=int(balance.total("dead_experts")) if balance else None,
                max_logit=result.max_logit,
                memory_gib=result.memory_gib,
                eta_stage_seconds=self.meter.eta_seconds(setup.plan.end_tokens - progress.tokens),
                slowest_rank=slowest.rank if slowest else None,
                slowest_ratio=slowest.ratio if slowest else None,
                skipped=result.action is Action.skip,
                skipped_steps=progress.guards.skipped,
                eta_run_seconds=self.meter.eta_seconds(self._total_tokens - progress.tokens),
            )
        )

        if balance is not None:
            self._balance(setup, progress, balance)

    def _balance(self, setup: StageSetup, progress: Progress, balance: Balance) -> None:
        for alarm in self._bell.check(balance.layers):
            self._event("router_alarm", progress, **asdict(alarm))
        settings = setup.run.monitor.balance
        # an audit that no record held would have been for nothing
        if any(is_due(progress.step, n) for n in (settings.layers_every_steps, settings.audit_every_steps)):
            numbers = sorted(balance.layers)
            names = balance.layers[numbers[0]]
            self._monitor.write(
                BalanceRecord(
                    step=progress.step,
                    tokens=progress.tokens,
                    stage=setup.plan.name,
                    layers=numbers,
                    # five digits: a run of K3's depth writes some 700 numbers a step
                    values={
                        name: [float(f"{balance.layers[n][name]:.5g}") for n in numbers] for name in names
                    },
                )
            )

    def _found(self, progress: Progress, verdict: Verdict) -> None:
        self._monitor.event(
            verdict.kind,
            step=verdict.step,
            tokens=progress.tokens,
            action="warn" if verdict.action is Action.update else verdict.action.value,
            found=verdict.message,
            record=str(verdict.record),
            suspects=verdict.suspects,
        )

    def evaluation(
        self, setup: StageSetup, progress: Progress, losses: list[HeldoutLoss], *, complete: bool
    ) -> None:
        """Held-out losses are measured, all of them if ``complete``."""
        for each in losses:
            record = EvalRecord(
                step=progress.step,
                tokens=progress.tokens,
                stage=setup.plan.name,
                heldout=each.heldout,
                context_tokens=each.context_tokens,
                loss=each.loss,
                predicted_tokens=each.predicted_tokens,
                seconds=each.seconds,
            )
            self._monitor.write(record)
            worse = self._ahead.worse(record, setup.plan.stage.context_tokens)
            if worse:
                self._event("longer_context_worse", progress, **worse)
        if not complete:
            self._event("evaluation_stopped", progress)

    def saved(self, progress: Progress, path: Path) -> None:
        """A checkpoint is complete."""
        self._event("checkpoint", progress, path=str(path))

    def save_failed(self, progress: Progress, reason: str, failures: int) -> None:
        """A checkpoint was not written, and ``failures`` in a row were not."""
        self._event("checkpoint_failed", progress, reason=reason, in_a_row=failures)

    def save_skipped(self, progress: Progress) -> None:
        """A checkpoint is left out because the one before is still being written."""
        self._event("checkpoint_skipped", progress, reason="the one before is still being written")

    def stage_ended(self, setup: StageSetup, progress: Progress) -> None:
        """A stage has used up its tokens."""
        self._event("stage_end", progress, stage=setup.plan.name)

    def stopped(self, progress: Progress, reason: str | None) -> None:
        """The run ends early because it was asked to."""
        self._event("stop", progress, reason=reason or "another rank was asked to stop")

    def finished(self, progress: Progress) -> None:
        """The run has used up all its tokens."""
        self._event("finished", progress)

    def hung(self, sentence: str, step: int, folder: Path) -> None:
        """The run is about to be ended because a rank hangs. Called by the one rank that speaks for all."""
        self._monitor.event("hung", step=step, tokens=0, found=sentence, stacks=str(folder))

    def close(self) -> None:
        """Write what is buffered."""
        self._monitor.close()

    def _event(self, name: str, progress: Progress, **detail: object) -> None:
        self._monitor.event(name, step=progress.step, tokens=progress.tokens, **detail)


def _model_tflops(setup: StageSetup, result: StepResult, seconds: float) -> float | None:
    """Of each rank; None for a step that was not computed."""
    if result.document_tokens is None:
        return None
    return model_tflops(
        setup.run.model,
        tokens=setup.plan.stage.batch_tokens,
        document_tokens=result.document_tokens,
        seconds=seconds,
        ranks=setup.groups.layout.world,
    )


def _device_name(device: torch.device) -> str | None:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None
