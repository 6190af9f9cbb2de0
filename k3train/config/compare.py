"""What changed between two starts of a run, and whether it may go on with the change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from k3train.config import history
from k3train.config.build import to_plain
from k3train.config.compose import load_resolved, replace_resolved, save_resolved
from k3train.config.identity import Kind, covers, kind_of
from k3train.config.problems import ConfigError, ConfigProblem, shown
from k3train.config.schema import Run, Stage
from k3train.config.trained import Trained


@dataclass(frozen=True, slots=True)
class Difference:
    """One setting with two values; None where a side does not have it."""

    key: str
    old: object
    new: object
    rule: str = ""
    """Why the run cannot go on with the new value; empty when it can."""

    def __str__(self) -> str:
        return f"{self.key}: {shown(self.old)} -> {shown(self.new)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Every setting that differs between two starts of a run."""

    refused: list[Difference]
    """They decide what has been trained."""
    overridden: list[Difference]
    """They do too, and ``resume.override`` names them."""
    accepted: list[Difference]
    """They decide speed, or what is yet to come."""
    all_trained: int = 0
    """Steps of the run when it had trained them all before, so that nothing was changed; else 0."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """How far a run has come, in terms of its stages."""

    stages: list[str]
    """Stages that have begun, in order."""
    tokens: int
    """What the last of them has trained."""


def draws_from(stages: Iterable[Stage], source: str) -> bool:
    """Whether one of ``stages`` draws from ``source``; an empty mix draws from all."""
    return any(not stage.mix or stage.mix.get(source, 0) > 0 for stage in stages)


def compare(old: Run, new: Run, *, trained_tokens: int = 0) -> Changes:
    """What differs between the run that trained ``trained_tokens`` and the one that would go on.

    Until something is trained every setting is free.
    """
    trained = _begun(old, trained_tokens)
    changes = Changes(refused=[], overridden=[], accepted=[])
    for each in differences(old, new):
        rule = _broken_rule(each, old, trained)
        if not rule:
            changes.accepted.append(each)
        elif any(covers(group, each.key) for group in new.resume.override):
            changes.overridden.append(each)
        else:
            changes.refused.append(Difference(each.key, each.old, each.new, rule))
    return changes


def differences(old: Run, new: Run) -> list[Difference]:
    """Every setting that differs, in the order of the schema."""
    before, after = dict(_leaves(to_plain(old))), dict(_leaves(to_plain(new)))
    keys = [*after, *(key for key in before if key not in after)]
    return [Difference(k, before.get(k), after.get(k)) for k in keys if before.get(k) != after.get(k)]


def settle(run: Run, path: Path, trained: Trained) -> Changes:
    """Write the resolved file of a run that starts or goes on; returns what changed since the last start.

    Changes are also written to the run's history. When all is ``trained``, before and with them, the file
    stays as it is: they would train nothing. Raises ConfigError, and writes nothing, when what is trained is
    another run's: another model or seed, or anything else that decided what the steps were trained on.
    Raises OSError, with the file and both as they were, when the disk takes the file or the history not. The
    checkpoint's own settings say what that was; the file does where they cannot be read.
    """
    if trained.settings is not None and trained.checkpoint is not None:
        tokens = tokens_of(trained, trained.settings)
        _refuse(compare(trained.settings, run, trained_tokens=tokens), run, trained.checkpoint)
        check_whole_steps(run, tokens, trained.checkpoint)
    if not path.exists():
        save_resolved(run, path)
        return Changes(refused=[], overridden=[], accepted=[])
    before = load_resolved(path)
    changes = compare(before, run, trained_tokens=tokens_of(trained, before))
    if trained.settings is None:
        _refuse(changes, run, path.parent)
    else:  # the file is of a start that trained nothing
        changes = replace(changes, refused=[], accepted=[*changes.accepted, *changes.refused])
    if not changes.accepted and not changes.overridden:
        return changes
    if 0 < max(_tokens(before), _tokens(run)) <= tokens_of(trained, before):
        return replace(changes, all_trained=trained.steps)
    told = {
        name: {each.key: [each.old, each.new] for each in group}
        for name, group in (("changed", changes.accepted), ("overridden", changes.overridden))
    }
    recorded = partial(history.record, path.parent, "settings", step=trained.steps, **told)
    replace_resolved(run, path, first=recorded)
    return changes


def describe(changes: Changes) -> Iterator[str]:
    """A line for each change that the run goes on with, or that comes too late."""
    if changes.all_trained:
        for each in (*changes.accepted, *changes.overridden):
            yield f"not changed, since nothing is left to train: {each}"
        yield (
            f"all {changes.all_trained} steps are trained, and run.yaml stays as it is: "
            "lengthen a stage or add one to train on, or start another run with another name"
        )
        return
    for each in changes.accepted:
        yield f"changed since the last start: {each}"
    for each in changes.overridden:
        yield f"changed since the last start, because resume.override says so: {each}"


def identity_problems(refused: list[Difference], run: Run, trained: Path) -> list[ConfigProblem]:
    """Why ``run``, with these differences, cannot go on from ``trained``, a run's folder or a checkpoint.

    A source that is new or gone is one problem, not one for each of its settings.
    """
    problems = [_identity_problem(each, run, trained) for each in refused]
    return list({problem.key: problem for problem in problems}.values())


def _identity_problem(each: Difference, run: Run, trained: Path) -> ConfigProblem:
    key, value, was, back = each.key, each.new, f"was {shown(each.old)}", "Keep the old value"
    other = "start another run with another name"
    if kind_of(key) in (Kind.source, Kind.epochs) and None in (each.old, each.new):
        key, _, _ = key.rpartition(".")
        source = run.data.sources.get(key.rpartition(".")[2])
        value = source and source.path
        was, back = ("was there", "Put it back") if source is None else ("was not there", "Take it out")
        if source is not None:
            other += " whose stages name their sources in a mix"
    accept = f"accept the change with resume.override=[{key}]"
    rule = f"{was} when {trained} was trained, and {each.rule}"
    return ConfigProblem(key, value, rule, f"{back}, {other}, or {accept}", "run.identity")


_OWN_RULES = {
    "model.mtp.num_layers": "its parameters would be new, or dropped with their moments (a stage may change "
    "mtp_loss_weight)",
}
"""Why single settings may not change, where that says more than that they decide what is trained."""


def _broken_rule(change: Difference, old: Run, trained: _Begun) -> str:
    """Why the change is not free, as the end of a sentence about its key; empty when it is."""
    name = change.key.split(".")[2] if change.key.count(".") > 1 else ""
    begun = trained.stages
    match kind_of(change.key):
        case None | Kind.identity:
            return _OWN_RULES.get(change.key, "decides what is trained") if begun else ""
        case Kind.stage:
            return f"the stage {name} has begun" if name in begun else ""
        case Kind.length:
            return _broken_length(change, name, trained)
        case Kind.order:
            order = cast("list[str]", change.new)
            return f"begins with stages that have begun, {begun}" if order[: len(begun)] != begun else ""
        case Kind.source | Kind.epochs:
            if change.old is None:  # a new source
                empty = [stage for stage in begun if not old.curriculum.stages[stage].mix]
                return f"the stage {empty[0]}, which has begun, draws from all sources" if empty else ""
            harmless = kind_of(change.key) is Kind.epochs and _only_a_limit(change.old, change.new)
            drawn = draws_from((old.curriculum.stages[stage] for stage in begun), name)
            return f"text of {name} has been drawn" if drawn and not harmless else ""
        case Kind.origin:
            return "training has begun from it" if begun and change.new is not None else ""
        case Kind.tunable:
            return ""


def _broken_length(change: Difference, stage: str, trained: _Begun) -> str:
    if stage not in trained.stages:
        return ""
    if stage != trained.stages[-1] or not isinstance(change.new, int):
        return f"the stage {stage} has been trained"
    return f"{trained.tokens} tokens of it have been trained" if change.new < trained.tokens else ""


def _only_a_limit(old: object, new: object) -> bool:
    """Whether another max_epochs leaves what was drawn alone: a broken number also moves where epochs end."""
    if not isinstance(old, float) or not isinstance(new, float) or old % 1:
        return False
    return new >= old or new % 1 == 0


def _refuse(changes: Changes, run: Run, trained: Path) -> None:
    if changes.refused:
        raise ConfigError(identity_problems(changes.refused, run, trained))


def tokens_of(trained: Trained, run: Run) -> int:
    """What is trained; where no checkpoint says it, what ``run`` has after as many steps."""
    if trained.tokens is not None:
        return trained.tokens
    left, tokens = trained.steps, 0
    for stage in _stages(run):
        steps = min(left, stage.tokens // stage.batch_tokens)
        left, tokens = left - steps, tokens + steps * stage.batch_tokens
    return tokens


def check_whole_steps(run: Run, trained_tokens: int, trained: Path) -> None:
    """Raise ConfigError when ``run`` would go on from ``trained``, a checkpoint, in the middle of a step.

    Only where ``resume.override`` has let a stage that has begun take another batch, or another length."""
    begun = _begun(run, trained_tokens)
    if not begun.stages:
        return
    name = begun.stages[-1]
    batch = run.curriculum.stages[name].batch_tokens
    if begun.tokens % batch:
        raise ConfigError(
            [
                ConfigProblem(
                    f"curriculum.stages.{name}.batch_tokens",
                    batch,
                    f"does not divide the {begun.tokens} tokens of the stage that {trained} has trained",
                    "Give a batch that divides them",
                    "run.identity",
                )
            ]
        )


def _stages(run: Run) -> list[Stage]:
    return [run.curriculum.stages[name] for name in run.curriculum.order]


def _tokens(run: Run) -> int:
    """Tokens of the whole run."""
    return sum(stage.tokens for stage in _stages(run))


def _begun(run: Run, trained_tokens: int) -> _Begun:
    begun: list[str] = []
    left, tokens = trained_tokens, 0
    for name, stage in zip(run.curriculum.order, _stages(run), strict=True):
        if left <= 0:
            break
        tokens = min(left, stage.tokens)
        begun.append(name)
        left -= tokens
    return _Begun(begun, tokens)


def _leaves(node: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Settings with their keys; a list is one setting."""
    if isinstance(node, Mapping):
        for name, child in cast("Mapping[str, object]", node).items():
            yield from _leaves(child, f"{path}.{name}" if path else name)
    else:
        yield path, node
