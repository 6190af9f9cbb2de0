"""Sequences for evaluation, from held-out corpora."""

from __future__ import annotations

import numpy as np

from k3train.config.schema import Run
from k3train.data.batch import MicroBatch, Piece
from k3train.data.indexed import CorpusError
from k3train.data.order import key_of, shuffled
from k3train.data.pack import best_fit
from k3train.data.sources import assemble, open_corpora


def heldout(run: Run, name: str, context_tokens: int, num_sequences: int) -> list[MicroBatch]:
    """Evaluation sequences of held-out corpus ``name``, one a micro-batch; the same for every run and rank.

    Documents that fill the context on their own come first, cut to it, in up to half of the sequences: they
    alone show what a long context gives. The rest are whole documents, packed. Fewer come back when the
    corpus has no more text.
    """
    corpus = open_corpora(run, {name: run.data.heldout[name]}, "heldout")[name]
    try:
        if not corpus.lengths.any():
            raise CorpusError(f"data.heldout.{name}: {corpus.folder} holds no text; name a corpus that does.")
        order = shuffled(np.arange(len(corpus.lengths)), key_of("heldout", corpus.fingerprint))
        lengths = corpus.lengths[order]
        long = order[lengths >= context_tokens][: (num_sequences + 1) // 2]
        rows = [[Piece(name, int(document), 0, context_tokens)] for document in long]
        rest = order[(lengths > 0) & ~np.isin(order, long)]
        size = np.minimum(corpus.lengths[rest], context_tokens)
        enough = int(np.searchsorted(np.cumsum(size), (num_sequences - len(rows)) * context_tokens)) + 1
        packed, count = best_fit(size[:enough], context_tokens)
        packs: list[list[Piece]] = [[] for _ in range(count)]
        columns = rest[:enough].tolist(), size[:enough].tolist(), packed.tolist()
        for document, length, row in zip(*columns, strict=True):
            packs[row].append(Piece(name, document, 0, length))
        rows += packs[: num_sequences - len(rows)]
        return [assemble({name: corpus}, [row], context_tokens, corpus.pad) for row in rows]
    finally:
        corpus.close()
