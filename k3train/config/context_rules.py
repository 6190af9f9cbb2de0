"""What a stage's context length asks of the stage before; read by the cross-field rules."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from k3train.config.layout_rules import key_of_stage
from k3train.config.merge import stage_parallel
from k3train.config.nearest import choices, multiples
from k3train.config.problems import ConfigProblem
from k3train.config.schema import Run


def context_problems(run: Run) -> Iterator[ConfigProblem]:
    """Every reason why a stage's context length cannot follow that of the stage before."""
    for before, name in pairwise(name for name in run.curriculum.order if name in run.curriculum.stages):
        yield from _grows(run, before, name)
        yield from _is_evaluated(run, before, name)


def _grows(run: Run, before: str, name: str) -> Iterator[ConfigProblem]:
    """Long documents are drawn for long contexts; a shorter one behind would cut them up."""
    shorter, longer = (run.curriculum.stages[each].context_tokens for each in (before, name))
    if longer < shorter:
        yield ConfigProblem(
            f"curriculum.stages.{name}.context_tokens",
            longer,
            f"is less than the {shorter} of {before}, the stage before",
            "Order the stages by context in curriculum.order",
            "stage.shrinking-context",
            ("curriculum.order", f"curriculum.stages.{before}.context_tokens"),
        )


def _is_evaluated(run: Run, before: str, name: str) -> Iterator[ConfigProblem]:
    """The stage before evaluates at this context length on its own ranks."""
    stages = run.curriculum.stages
    parallel = stage_parallel(run.parallel, stages[before].parallel)
    shards, context = parallel.cp * parallel.tp, stages[name].context_tokens
    if run.curriculum.eval_one_ahead and run.data.heldout and context % shards:
        key_of = key_of_stage(before, stages[before])
        yield ConfigProblem(
            f"curriculum.stages.{name}.context_tokens",
            context,
            f"must be a multiple of cp*tp = {shards} of {before}, the stage before, which evaluates at it",
            f"Use {choices(multiples(context, shards))}, or set curriculum.eval_one_ahead=false",
            "stage.context-ahead",
            ("curriculum.order", "curriculum.eval_one_ahead", key_of("cp"), key_of("tp")),
        )
