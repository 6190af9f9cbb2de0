"""The stages of a run laid end to end. The clock is tokens; steps are derived. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from k3train.config.schema import Run, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One stage in its place."""

    name: str
    index: int
    """Position in curriculum.order, from 0."""
    stage: Stage
    start_tokens: int
    """Tokens trained before this stage."""
    end_tokens: int
    """Tokens trained when this stage is done."""
    start_step: int
    """Optimizer steps before this stage, as long as every stage keeps its batch."""
    steps: int
    """Optimizer steps of this stage."""
    sequences_per_step: int
    """Packed sequences of one step, over all data-parallel ranks."""

    @property
    def end_step(self) -> int:
        """Optimizer steps when this stage is done, as long as every stage keeps its batch."""
        return self.start_step + self.steps

    def steps_done(self, tokens: int) -> int:
        """Steps of this stage that are done when the run has trained ``tokens``, in steps of today's size.

        The number of the run's step does not tell: with ``resume.override`` stages may have begun, or ended,
        with other steps.
        """
        return (tokens - self.start_tokens) // self.stage.batch_tokens


def stage_table(run: Run) -> list[StagePlan]:
    """The stages in training order. The run must have passed the configuration's rules."""
    table: list[StagePlan] = []
    tokens = step = 0
    for index, name in enumerate(run.curriculum.order):
        stage = run.curriculum.stages[name]
        steps = stage.tokens // stage.batch_tokens
        assert steps * stage.batch_tokens == stage.tokens, f"stage {name} is not whole steps"
        plan = StagePlan(
            name=name,
            index=index,
            stage=stage,
            start_tokens=tokens,
            end_tokens=tokens + stage.tokens,
            start_step=step,
            steps=steps,
            sequences_per_step=stage.batch_tokens // stage.context_tokens,
        )
        table.append(plan)
        tokens, step = plan.end_tokens, plan.end_step
    return table


def context_ahead(run: Run, table: Sequence[StagePlan], plan: StagePlan) -> int | None:
    """Tokens of the next stage's context, at which ``plan`` evaluates too; None when it does not."""
    following = table[plan.index + 1 :]
    if not (run.curriculum.eval_one_ahead and run.data.heldout and following):
        return None
    return following[0].stage.context_tokens


def stage_at(table: Sequence[StagePlan], tokens: int) -> StagePlan:
    """The stage that trains the next token after ``tokens``; on a boundary this is the later stage.

    At the end of the run it is the last stage. Raises ValueError outside the run.
    """
    total = total_tokens(table)
    if not 0 <= tokens <= total:
        raise ValueError(f"{tokens} tokens lie outside the run, which has {total}")
    return next((plan for plan in table if tokens < plan.end_tokens), table[-1])


def total_tokens(table: Sequence[StagePlan]) -> int:
    """Tokens of the whole run."""
    return table[-1].end_tokens
