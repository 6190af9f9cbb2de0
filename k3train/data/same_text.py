"""Whether a run goes on with the text that it was trained on, by the hash of each source."""

from __future__ import annotations

from collections.abc import Mapping

from k3train.config.compare import draws_from, tokens_of
from k3train.config.identity import covers
from k3train.config.schema import Run
from k3train.config.trained import Trained
from k3train.curriculum.stages import stage_table
from k3train.data.indexed import CorpusError
from k3train.data.sources import open_corpora


def check_text_on_disk(run: Run, trained: Trained) -> None:
    """Raise CorpusError when a source that ``run`` still draws from holds other text than it was trained on.

    The corpora's manifests say what they hold; no text is read.
    """
    paths = {
        name: run.data.sources[name].path for name in _still_drawn(run, trained) if name in trained.corpora
    }
    corpora = open_corpora(run, paths, "sources")
    try:
        check_same_text(run, trained.corpora, {name: each.fingerprint for name, each in corpora.items()})
    finally:
        for corpus in corpora.values():
            corpus.close()


def check_same_text(run: Run, trained: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise CorpusError for the first source whose hash ``now`` is not the one ``trained`` has of it.

    Those whose path ``resume.override`` names are left out.
    """
    for name, fingerprint in now.items():
        key = f"data.sources.{name}.path"
        accepted = any(covers(group, key) for group in run.resume.override)
        if trained.get(name, fingerprint) != fingerprint and not accepted:
            raise CorpusError(
                f"data.sources.{name}: {run.data.sources[name].path} is not the text that this run was "
                "trained on; restore it, start another run with another name, or accept it with "
                f"resume.override=[{key}]."
            )


def _still_drawn(run: Run, trained: Trained) -> list[str]:
    """Sources that a stage which is not through draws from."""
    done = tokens_of(trained, run)
    stages = [plan.stage for plan in stage_table(run) if plan.end_tokens > done]
    return [name for name in run.data.sources if draws_from(stages, name)]
