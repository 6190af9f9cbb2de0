"""Whether a run's corpora can serve it, found out before any rank starts."""

from __future__ import annotations

import filecmp

from k3train.config.problems import ConfigError, ConfigProblem
from k3train.config.schema import Run
from k3train.curriculum.stages import stage_table
from k3train.data.corpus import Corpus
from k3train.data.heldout import heldout
from k3train.data.indexed import tokens_path
from k3train.data.open import open_data
from k3train.data.sources import open_corpora


def check_data(run: Run) -> None:
    """Open every source and held-out corpus, and plan every stage where that takes seconds. Needs no GPU and
    no process group.

    Raises ConfigError for settings, a held-out corpus that is a source among them, and CorpusError for
    files, as training would.
    """
    table = stage_table(run)
    open_data(run, table, table[0]).close()
    for name in run.data.heldout:
        for plan in table:
            heldout(run, name, plan.stage.context_tokens, 1)
    check_apart(run)


def check_apart(run: Run) -> None:
    """Refuse held-out corpora whose text is that of a source, wherever it lies; raises ConfigError.

    Copies are known by the hashes in their manifests; unsealed ones of one size are read.
    """
    paths = {name: source.path for name, source in run.data.sources.items()}
    sources = open_corpora(run, paths, "sources")
    tests = open_corpora(run, run.data.heldout, "heldout")
    try:
        problems = [
            _trained_on(test, held.folder, source, known.folder)
            for test, held in tests.items()
            for source, known in sources.items()
            if _same_text(held, known)
        ]
    finally:
        for corpus in (*sources.values(), *tests.values()):
            corpus.close()
    if problems:
        raise ConfigError(problems)


def _same_text(one: Corpus, other: Corpus) -> bool:
    mine, theirs = tokens_path(one.folder), tokens_path(other.folder)
    if mine.samefile(theirs):
        return True
    if one.manifest and other.manifest:
        return one.manifest.files[mine.name]["sha256"] == other.manifest.files[theirs.name]["sha256"]
    return filecmp.cmp(mine, theirs, shallow=False)


def _trained_on(test: str, held: object, source: str, known: object) -> ConfigProblem:
    where = f"({known}), so that its loss would be measured on trained text"
    return ConfigProblem(
        key=f"data.heldout.{test}",
        value=str(held),
        rule=f"holds the text of data.sources.{source} {where}",
        fix="Name a corpus that is no source, or take the source out",
        id="data.heldout-trained",
        also=(f"data.sources.{source}.path",),
    )
