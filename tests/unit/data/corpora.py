"""Small corpora and runs for the data tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from k3train.config.schema import Data, Model, Run, Source, Stage
from k3train.data.corpus import Manifest, write_corpus

VOCAB = 5000


def make_corpus(folder: Path, lengths: list[int], *, seed: int = 0, tokenizer: str = "t") -> Manifest:
    """A sealed corpus of random tokens with documents of these lengths."""
    rng = np.random.default_rng(seed)
    return write_corpus(
        folder,
        (rng.integers(3, VOCAB, n) for n in lengths),
        tokenizer_sha256=tokenizer,
        vocab_size=VOCAB,
        special={"pad": 0, "bos": 1, "eod": 2},
        licences={"made up": "CC0"},
        command="test",
    )


def natural_lengths(count: int, *, seed: int = 0, largest: int = 5000) -> list[int]:
    """Document lengths with a long tail, the shortest 1."""
    draw = np.random.default_rng(seed).lognormal(4.5, 1.4, count)
    return np.clip(draw, 1, largest).astype(int).tolist()


def make_run(sources: dict[str, Source], stages: dict[str, Stage], **data: object) -> Run:
    """A run over these sources; stages in their order."""
    run = Run(model=Model(vocab_size=VOCAB), data=Data(sources=sources, **data))  # type: ignore[arg-type]
    run.curriculum.stages = stages
    run.curriculum.order = list(stages)
    return run
