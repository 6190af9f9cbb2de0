"""What changed between two runs, and whether a run directory may go on with the change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from k3train.config.build import to_plain
from k3train.config.compose import load_resolved, replace_resolved, save_resolved
from k3train.config.problems import ConfigError, ConfigProblem, shown
from k3train.config.schema import Run

_IDENTITY = ("seed", "model", "data")
_TUNABLE = ("data.heldout", "data.prefetch_steps", "data.allow_unsealed")
"""Below the identity, what may change all the same."""
_STAGE_TUNABLE = ("parallel", "learning_rate", "micro_batch_sequences")
"""Of a stage that has begun, what may change all the same: it decides speed or what is yet to come."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One setting with two values; None where a side does not have it."""

    key: str
    old: object
    new: object

    def __str__(self) -> str:
        return f"{self.key}: {shown(self.old)} -> {shown(self.new)}"


def compare(old: Run, new: Run, *, trained_steps: int = 0) -> tuple[list[Difference], list[Difference]]:
    """Differences of what is trained (model, seed, data, stages that have begun), and all others."""
    identity: list[Difference] = []
    tunable: list[Difference] = []
    begun = _begun_stages(old, trained_steps)
    if new.curriculum.order[: len(begun)] != begun:
        identity.append(Difference("curriculum.order", old.curriculum.order, new.curriculum.order))
    for difference in differences(old, new):
        if difference.key == "curriculum.order" and identity:
            continue
        (identity if _is_identity(difference.key, begun) else tunable).append(difference)
    return identity, tunable


def differences(old: Run, new: Run) -> list[Difference]:
    """Every setting that differs, in the order of the schema."""
    before, after = dict(_leaves(to_plain(old))), dict(_leaves(to_plain(new)))
    keys = [*after, *(key for key in before if key not in after)]
    return [Difference(k, before.get(k), after.get(k)) for k in keys if before.get(k) != after.get(k)]


def settle(run: Run, path: Path, *, trained_steps: int = 0) -> list[Difference]:
    """Write the resolved file of a run that starts or goes on; returns what changed since the last start.

    Raises ConfigError when the file holds another run: another model, seed or data, or other stages up to
    the one that ``trained_steps`` reached.
    """
    try:
        save_resolved(run, path)
    except FileExistsError:
        identity, tunable = compare(load_resolved(path), run, trained_steps=trained_steps)
        if identity:
            raise ConfigError(identity_problems(identity, path.parent)) from None
        replace_resolved(run, path)
        return tunable
    return []


def identity_problems(identity: list[Difference], trained: Path) -> list[ConfigProblem]:
    """Why a run with these differences cannot go on from ``trained``, a run's folder or a checkpoint."""
    fix = "Keep the old value, or start another run with another name"
    return [
        ConfigProblem(
            difference.key,
            difference.new,
            f"was {shown(difference.old)} when {trained} was trained, and decides what is trained",
            fix,
            "run.identity",
        )
        for difference in identity
    ]


def _is_identity(key: str, begun: list[str]) -> bool:
    for name in begun:
        stage = f"curriculum.stages.{name}"
        if _below(key, stage):
            return not any(_below(key, f"{stage}.{part}") for part in _STAGE_TUNABLE)
    return any(_below(key, part) for part in _IDENTITY) and not any(_below(key, part) for part in _TUNABLE)


def _below(key: str, prefix: str) -> bool:
    return key == prefix or key.startswith(f"{prefix}.")


def _begun_stages(run: Run, trained_steps: int) -> list[str]:
    begun: list[str] = []
    start = 0
    for name in run.curriculum.order:
        if start >= trained_steps:
            break
        begun.append(name)
        stage = run.curriculum.stages[name]
        start += stage.tokens // stage.batch_tokens
    return begun


def _leaves(node: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Settings with their keys; a list is one setting."""
    if isinstance(node, Mapping):
        for name, child in cast("Mapping[str, object]", node).items():
            yield from _leaves(child, f"{path}.{name}" if path else name)
    else:
        yield path, node
