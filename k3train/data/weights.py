"""How much of a stage's text each source gives."""

from __future__ import annotations

import math

from k3train.config.problems import ConfigError, ConfigProblem
from k3train.config.schema import Run
from k3train.curriculum.stages import StagePlan
from k3train.data.mix import Stream


def stage_weights(run: Run, plan: StagePlan, streams: dict[str, Stream]) -> dict[str, float]:
    """The mix of a stage; without one, sources in proportion to their text."""
    key = f"curriculum.stages.{plan.name}.mix"
    # A source without a document is part of an unnamed mix too: it must not drop out without a word.
    mix = plan.stage.mix or {name: float(max(stream.epoch_tokens, 1)) for name, stream in streams.items()}
    problems = [
        ConfigProblem(
            key=f"{key}.{name}",
            value=weight,
            rule="names no source" if name not in streams else "is not a weight",
            fix=f"Use a number from 0 on for one of: {', '.join(streams) or 'none, data.sources is empty'}",
            id="data.mix",
        )
        for name, weight in mix.items()
        if name not in streams or not 0 <= weight < math.inf
    ]
    used = {name: weight for name, weight in mix.items() if weight > 0}
    problems += [
        ConfigProblem(
            key=f"data.sources.{name}.min_document_tokens",
            value=run.data.sources[name].min_document_tokens,
            rule=f"leaves no document of {run.data.sources[name].path}",
            fix="Lower it, or take the source out of the mix",
            id="data.no-documents",
        )
        for name in used
        if name in streams and streams[name].epoch_tokens == 0
    ]
    if not used:
        problems.append(
            ConfigProblem(
                key=key,
                value=mix,
                rule="gives no source any weight",
                fix="Name at least one source of data.sources",
                id="data.mix",
            )
        )
    if problems:
        raise ConfigError(problems)
    return used
