"""Everything that is wrong with a release, reported at once."""

from __future__ import annotations

from collections.abc import Sequence

from k3train.checkpoint.manifest import CheckpointError

LISTED = 20
"""Problems that a message names."""


def raise_all(what: str, problems: Sequence[str]) -> None:
    """Raise CheckpointError that names up to ``LISTED`` of ``problems``, if there are any."""
    if not problems:
        return
    more = len(problems) - LISTED
    lines = [*problems[:LISTED], *([f"and {more} more"] if more > 0 else [])]
    raise CheckpointError("\n  ".join([f"{what}:", *lines]))
