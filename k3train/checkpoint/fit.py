"""Whether a checkpoint's tensors are those of a model, as far as settings tell: nothing is read. No torch."""

from __future__ import annotations

from k3train.checkpoint.hf.names import Shape, table
from k3train.config.compare import differences
from k3train.config.problems import shown
from k3train.config.schema import Model, Precision, Run

_LISTED = 8
"""Settings that a message names."""
_ROUTER, _ROUTER_INPUT = "model.moe.router.", "model.moe.router.input"
"""Routing rules may change: what one carries is left out or starts anew. The input may not."""


def misfit(theirs: Model, ours: Model) -> tuple[str, str] | None:
    """Why tensors of ``theirs`` cannot be loaded into ``ours``, and what to do; None when they can.

    The first is the end of a sentence that begins with the checkpoint.
    """
    there, here = _forms(theirs), _forms(ours)
    if there == here:
        return None
    if {name: shape for name, (shape, _) in there.items()} == {n: shape for n, (shape, _) in here.items()}:
        return other_precision(theirs.precision, ours.precision)
    found = [
        each
        for each in differences(Run(model=theirs), Run(model=ours))
        if not each.key.startswith(_ROUTER) or each.key == _ROUTER_INPUT
    ]
    words = [f"{each.key} is {shown(each.old)} there and {shown(each.new)} here" for each in found[:_LISTED]]
    more = [f"and {len(found) - _LISTED} more differ"] if len(found) > _LISTED else []
    return f"holds another model: {', '.join([*words, *more])}", "Use the model settings it was saved with"


def other_precision(theirs: Precision, ours: Precision) -> tuple[str, str]:
    """What ``misfit`` says of a checkpoint whose matrices are the model's but for their precision."""
    rule = f"holds its matrices in {theirs.value}, and model.precision is {ours.value}"
    again = ", or import the release again with --precision fp32" if ours is Precision.fp32 else ""
    return rule, f"Set model.precision={theirs.value}{again}"


def _forms(model: Model) -> dict[str, tuple[Shape, bool]]:
    """Shape of each tensor by name, and whether it is fp32."""
    whole = model.precision is Precision.fp32
    return {entry.ours: (entry.shape, whole or entry.fp32) for entry in table(model)}
