"""Whether a run's corpora can serve it, found out before any rank starts."""

from __future__ import annotations

from k3train.config.schema import Run
from k3train.curriculum.stages import stage_table
from k3train.data.heldout import heldout
from k3train.data.open import open_data


def check_data(run: Run) -> None:
    """Open every source and held-out corpus, and plan every stage where that takes seconds. Needs no GPU and
    no process group.

    Raises ConfigError for settings and CorpusError for files, as training would.
    """
    table = stage_table(run)
    open_data(run, table, table[0]).close()
    for name in run.data.heldout:
        for plan in table:
            heldout(run, name, plan.stage.context_tokens, 1)
