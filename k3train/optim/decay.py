"""Which parameters weight decay touches. No torch."""

from __future__ import annotations

from typing import Any

NEVER_DECAYED = ("norm", "conv", "a_log", "dt_bias", "attn_res", "query", "expert_bias")
"""Parts of a parameter's dotted name, lower case, that exempt it whatever its shape."""


def is_decayed(name: str, param: Any) -> bool:
    """Whether weight decay applies: to matrices only, never to what ``NEVER_DECAYED`` names.

    ``name`` is the dotted name in the module; wrappers may prefix it. ``param`` has a ``shape``: a tensor, or
    a parameter of a plan. Vectors (norms, biases, gates' A and dt, AttnRes queries) are exempt by their shape
    already; the names matter for convolutions, which are stored as [channels, taps], and for stacked vectors.
    A module exempts a parameter of its own with ``param.no_weight_decay = True``.
    """
    if len(param.shape) < 2 or getattr(param, "no_weight_decay", False):
        return False
    parts = name.lower().split(".")
    return not any(mark in part for part in parts for mark in NEVER_DECAYED)
