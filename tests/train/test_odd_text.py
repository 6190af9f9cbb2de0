"""Text that leaves nothing to predict."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from k3train.config.schema import Curriculum, Stage
from k3train.data.corpus import write_corpus
from tests.train.runs import VOCAB, losses, make_run, records, train_run


def test_a_step_without_a_label_divides_by_no_zero(tmp_path: Path) -> None:
    """Documents of one token have no next token: every label of every micro-batch is masked."""
    for name in ("train", "heldout"):
        write_corpus(
            tmp_path / "corpus" / name,
            (np.array([3 + number % 50]) for number in range(3000)),
            tokenizer_sha256="made up",
            vocab_size=VOCAB,
            special={"pad": 0, "bos": 1, "eod": 2},
            licences={"made up": "CC0"},
            command="test",
        )
    stages = {"only": Stage(context_tokens=64, tokens=2 * 128, batch_tokens=128)}
    run = make_run(tmp_path, curriculum=Curriculum(stages=stages, order=["only"], eval_tokens=64))
    assert train_run(run) == [0]
    assert losses(run) == {1: 0.0, 2: 0.0}
    assert [r["loss"] for r in records(run, "eval")] == [0.0, 0.0]
    assert all(math.isfinite(r["grad_norm"]) for r in records(run, "step"))
