"""What FP8 products ask of a run; read by the cross-field rules and by the products themselves."""

from __future__ import annotations

from collections.abc import Iterator

from k3train.config.merge import stage_parallel
from k3train.config.nearest import choices, multiples
from k3train.config.problems import ConfigProblem
from k3train.config.schema import Device, Fp8, Precision, Run

MULTIPLE = {Fp8.tensorwise: 16, Fp8.blockwise: 128, Fp8.mxfp8: 32}
"""Rows and columns of an operand come in multiples of this: values that share a scale, or 16 bytes."""
_OR_NOT = "or model.fp8=none"


def fp8_problems(run: Run) -> Iterator[ConfigProblem]:
    """Every reason why this run cannot multiply in FP8, as far as settings tell."""
    fp8 = run.model.fp8
    if fp8 is Fp8.none:
        return
    if run.model.precision is not Precision.bf16:
        rule = f"rounds bf16 operands, and model.precision = {run.model.precision.value}"
        fix = f"Use model.precision=bf16, {_OR_NOT}"
        yield ConfigProblem("model.fp8", fp8.value, rule, fix, "fp8.precision", ("model.precision",))
    if run.device is Device.cpu:
        fix = f"Use device=cuda, {_OR_NOT}"
        yield ConfigProblem(
            "model.fp8", fp8.value, "needs a GPU, and device = cpu", fix, "fp8.cpu", ("device",)
        )
    unit, hidden = MULTIPLE[fp8], run.model.hidden_size
    if hidden % unit:
        rule = f"multiplies matrices whose sides are multiples of {unit}, and model.hidden_size = {hidden}"
        fix = f"Use model.hidden_size={choices(multiples(hidden, unit))}, {_OR_NOT}"
        yield ConfigProblem("model.fp8", fp8.value, rule, fix, "fp8.hidden", ("model.hidden_size",))
    yield from _tokens(run, unit)


def _tokens(run: Run, unit: int) -> Iterator[ConfigProblem]:
    """Weight gradients are sums over a rank's tokens: their products have them as a side."""
    for name, stage in run.curriculum.stages.items():
        parallel, at = stage_parallel(run.parallel, stage.parallel), f"curriculum.stages.{name}"
        shards, tokens = parallel.cp * parallel.tp, stage.context_tokens * stage.micro_batch_sequences
        if tokens % shards == 0 and tokens // shards % unit:
            rule = (
                f"leaves each of cp*tp = {shards} ranks {tokens // shards} tokens, and model.fp8 = "
                f"{run.model.fp8.value} takes multiples of {unit}"
            )
            fix = f"Use {choices(multiples(stage.context_tokens, unit * shards))}, {_OR_NOT}"
            also = (
                f"{at}.micro_batch_sequences",
                f"{at}.parallel",
                "parallel.cp",
                "parallel.tp",
                "model.fp8",
            )
            yield ConfigProblem(f"{at}.context_tokens", stage.context_tokens, rule, fix, "fp8.tokens", also)
