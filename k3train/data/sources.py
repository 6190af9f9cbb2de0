"""Open the sources of a run, check them, and lay the stages end to end over their text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from k3train.config.problems import ConfigError, ConfigProblem
from k3train.config.schema import Run
from k3train.curriculum.stages import StagePlan
from k3train.data.batch import MicroBatch, Piece, join_pieces
from k3train.data.bookmark import find_place
from k3train.data.corpus import Corpus, file_sha256
from k3train.data.indexed import CorpusError
from k3train.data.mix import Exhausted, Position, Stream
from k3train.data.plan import StageOrder
from k3train.data.weights import stage_weights

_EXACT_DOCUMENTS = 2_000_000
"""Up to so many documents in a run, text is counted by making the whole plan; beyond, by weights."""
_AHEAD_SEQUENCES = 3
"""A stage may take so many sequences of a source beside its weight's share."""


def open_corpora(run: Run, paths: dict[str, str], group: str) -> dict[str, Corpus]:
    """Open the folders of ``data.<group>``; raises CorpusError with all that is wrong with any of them."""
    tokenizer = run.data.tokenizer
    if tokenizer and not Path(tokenizer).is_file():
        raise ConfigError(
            [
                ConfigProblem(
                    key="data.tokenizer",
                    value=tokenizer,
                    rule="is not a file",
                    fix="Build the corpus first (python data/build.py tiny) or correct the path",
                    id="data.tokenizer",
                )
            ]
        )
    expected = file_sha256(Path(tokenizer)) if tokenizer else None
    corpora: dict[str, Corpus] = {}
    errors: list[str] = []
    for name, path in paths.items():
        key = f"data.{group}.{name}{'.path' if group == 'sources' else ''}"
        try:
            corpus = Corpus(
                Path(path), vocab_size=run.model.vocab_size, allow_unsealed=run.data.allow_unsealed
            )
        except CorpusError as error:
            errors.append(f"{key}: {error}")
            continue
        corpora[name] = corpus
        if expected and corpus.manifest and corpus.manifest.tokenizer_sha256 != expected:
            errors.append(
                f"{key}: {path} was made with another tokenizer than data.tokenizer = {tokenizer}; "
                "build the corpus again or point data.tokenizer at the file beside it."
            )
    if errors:
        for corpus in corpora.values():
            corpus.close()
        raise CorpusError("\n".join(errors))
    return corpora


def stage_orders(
    run: Run,
    table: Sequence[StagePlan],
    stage: StagePlan,
    streams: dict[str, Stream],
    kept: dict[str, Any] | None = None,
) -> list[StageOrder]:
    """The orders of the stages up to and with ``stage``, each going on where the one before it ends.

    Refuses a run whose stages, all of them, need more text than max_epochs allows. Up to a number of
    documents that takes seconds this is found by making the whole plan; beyond it, by comparing weights. Only
    then a ``kept`` bookmark is used: its stage's order is the first one, and begins at the bookmark.
    """
    weights = {plan.name: stage_weights(run, plan, streams) for plan in table}
    wanted = _wanted(table, weights)
    documents = sum(wanted[n] * streams[n].num_documents / streams[n].epoch_tokens for n in wanted)
    exact = documents <= _EXACT_DOCUMENTS
    if not exact:
        wanted = _at_most(wanted, table, weights)
    short = {name for name in wanted if wanted[name] > streams[name].allowed_tokens}
    if short and not exact:
        raise ConfigError([_too_little(streams[name], wanted[name]) for name in sorted(short)])

    def order_of(plan: StagePlan, start: dict[str, Position]) -> StageOrder:
        return StageOrder(
            streams=streams,
            weights=weights[plan.name],
            context_tokens=plan.stage.context_tokens,
            pack_window_tokens=run.data.pack_window_tokens,
            seed=run.seed,
            start=start,
        )

    place = None if exact or kept is None else find_place(kept, run, table, stage, streams)
    if place is None:
        orders = [order_of(table[0], {name: Position() for name in streams})]
    else:
        orders = [order_of(place.stage, place.mark.start)]
        orders[0].go_to(place.mark)
    first = 0 if place is None else place.stage.index
    for plan in table[first : None if exact else stage.index]:
        try:
            end = orders[-1].end(plan.steps * plan.sequences_per_step)
        except Exhausted as error:
            names = sorted({error.name, *short})
            raise ConfigError([_too_little(streams[name], wanted[name]) for name in names]) from None
        if plan is not table[-1]:
            orders.append(order_of(table[plan.index + 1], end))
    return orders[: stage.index + 1 - first]


def _wanted(table: Sequence[StagePlan], weights: dict[str, dict[str, float]]) -> dict[str, float]:
    """Tokens that all stages need of each source that any of them draws from, by their weights."""
    wanted: dict[str, float] = {}
    for plan in table:
        total = sum(weights[plan.name].values())
        for name, weight in weights[plan.name].items():
            wanted[name] = wanted.get(name, 0.0) + weight / total * plan.stage.tokens
    return wanted


def _at_most(
    wanted: dict[str, float], table: Sequence[StagePlan], weights: dict[str, dict[str, float]]
) -> dict[str, float]:
    """What stages may take beside their weights' share: one that ends within a shuffled window up to two
    sequences more, and the end of an epoch, of less than a sequence, is drawn at once."""
    contexts = {
        name: sum(plan.stage.context_tokens for plan in table if weights[plan.name].get(name))
        for name in wanted
    }
    return {name: tokens + _AHEAD_SEQUENCES * contexts[name] for name, tokens in wanted.items()}


def _too_little(stream: Stream, wanted: float) -> ConfigProblem:
    """A source that the stages use up. Packing may take a little more of it than its weight says."""
    needed = max(int(wanted), stream.allowed_tokens)
    epochs = math.ceil(1.02 * needed / stream.epoch_tokens * 10 + 1e-6) / 10
    if epochs <= stream.max_epochs:
        epochs = math.floor(stream.max_epochs) + 1
    return ConfigProblem(
        key=f"data.sources.{stream.name}.max_epochs",
        value=stream.max_epochs,
        rule=(
            f"allows {stream.allowed_tokens:,} tokens (an epoch has {stream.epoch_tokens:,}), and the stages "
            f"need about {needed:,}"
        ),
        fix=f"Set it to {epochs:g} or more, give {stream.name} less weight or train on fewer tokens",
        id="data.max-epochs",
    )


def assemble(
    corpora: dict[str, Corpus], pieces: list[list[Piece]], context_tokens: int, pad: int
) -> MicroBatch:
    """Read the pieces of each sequence and lay the sequences end to end. Raises CorpusError."""
    tokens = [[corpora[p.source].read(p.document, p.start, p.length) for p in row] for row in pieces]
    return join_pieces(pieces, tokens, context_tokens=context_tokens, pad=pad)
