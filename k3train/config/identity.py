"""What each setting means for a run that has trained: whether a later start may change it."""

from __future__ import annotations

from enum import Enum
from fnmatch import fnmatchcase


class Kind(Enum):
    """When a setting may no longer change. What may change is said aloud all the same."""

    identity = "identity"
    """Once anything is trained: it decides what the run trains from its first step on."""
    stage = "stage"
    """Once its stage has begun: it decides what the stage trains."""
    length = "length"
    """Of a finished stage; the stage that is being trained may become longer, or end where it stands."""
    order = "order"
    """As far as stages have begun."""
    source = "source"
    """Once a stage has drawn from the source: it decides which documents were drawn, and when."""
    epochs = "epochs"
    """As ``source``, except that whole numbers only limit what is still to come."""
    origin = "origin"
    """Once something is trained, unless it is taken away."""
    tunable = "tunable"
    """At every start."""


KINDS: dict[str, Kind] = {
    "name": Kind.tunable,
    "dir": Kind.tunable,
    "seed": Kind.identity,
    "device": Kind.tunable,
    "model": Kind.identity,
    "model.fp8": Kind.tunable,
    "parallel": Kind.tunable,
    "optim": Kind.tunable,
    "optim.optimizer": Kind.identity,
    "optim.muon.adamw": Kind.identity,
    # A checkpoint knows the hash of each text: where the text lies is free.
    "data.sources.*.path": Kind.tunable,
    "data.sources.*.min_document_tokens": Kind.source,
    "data.sources.*.max_epochs": Kind.epochs,
    "data.heldout": Kind.tunable,
    "data.tokenizer": Kind.tunable,
    "data.pack_window_tokens": Kind.identity,
    "data.prefetch_steps": Kind.tunable,
    "data.allow_unsealed": Kind.tunable,
    "curriculum.stages.*.context_tokens": Kind.stage,
    "curriculum.stages.*.tokens": Kind.length,
    "curriculum.stages.*.batch_tokens": Kind.stage,
    "curriculum.stages.*.mix": Kind.stage,
    "curriculum.stages.*.mtp_loss_weight": Kind.stage,
    "curriculum.stages.*.micro_batch_sequences": Kind.tunable,
    "curriculum.stages.*.learning_rate": Kind.tunable,
    "curriculum.stages.*.parallel": Kind.tunable,
    "curriculum.order": Kind.order,
    "curriculum.eval_tokens": Kind.tunable,
    "curriculum.eval_every_steps": Kind.tunable,
    "curriculum.eval_one_ahead": Kind.tunable,
    "checkpoint": Kind.tunable,
    "checkpoint.load_from": Kind.origin,
    "monitor": Kind.tunable,
    "guards": Kind.tunable,
    "cluster": Kind.tunable,
    "resume": Kind.tunable,
}
"""Key or group -> kind. ``*`` is a name that the user chooses; the longest entry that holds a key counts."""


def kind_of(key: str) -> Kind | None:
    """The kind of the setting at ``key``; None when the table leaves it out, which counts as identity."""
    fitting = [pattern for pattern in KINDS if _holds(pattern, key)]
    return KINDS[max(fitting, key=lambda pattern: pattern.count("."))] if fitting else None


def covers(group: str, key: str) -> bool:
    """Whether ``key`` is ``group`` or lies below it."""
    return key == group or key.startswith(f"{group}.")


def _holds(pattern: str, key: str) -> bool:
    wanted, given = pattern.split("."), key.split(".")
    return len(given) >= len(wanted) and all(map(fnmatchcase, given, wanted))
