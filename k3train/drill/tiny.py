"""The run that is drilled: every kind of layer, two stages, as small as it goes, over a generated corpus."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from k3train.config.rules import check
from k3train.config.schema import (
    AttnRes,
    Checkpoint,
    Cluster,
    Curriculum,
    Data,
    Device,
    Kda,
    Mla,
    Model,
    Moe,
    Optim,
    Parallel,
    Run,
    Source,
    Stage,
    StageParallel,
)
from k3train.data.corpus import write_corpus

VOCAB = 64
BATCH = 768
"""Tokens of a global batch: 12 or 6 sequences, which divide over 2, 3 and 4 ranks."""
STEPS = {"short": 8, "long": 4}
SAVE_EVERY = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a tiny run is spread over ranks."""

    ranks: int
    parallel: Parallel
    second: StageParallel
    """What the second stage changes."""
    together: tuple[int, int]
    """Sequences of a micro-batch in each stage: as many as go, for each micro-batch costs, not its tokens."""


LAYOUTS = {
    "2 ranks: ep 2, then cp 2": Layout(
        ranks=2, parallel=Parallel(ep=2), second=StageParallel(cp=2), together=(6, 6)
    ),
    "3 ranks: dp 3": Layout(ranks=3, parallel=Parallel(), second=StageParallel(), together=(4, 2)),
    "4 ranks: pp 2, ep 2": Layout(
        ranks=4, parallel=Parallel(pp=2, ep=2), second=StageParallel(), together=(3, 1)
    ),
}


def make_corpus(folder: Path, *, documents: int, seed: int, below_tokens: int = 100) -> None:
    """Documents of 3 to ``below_tokens`` - 1 tokens, counting upwards with a random start and stride.

    There is something to learn: two tokens tell the rest.
    """
    random = np.random.default_rng(seed)
    lengths = random.integers(3, below_tokens, documents)
    strides = random.integers(1, 5, documents)
    starts = random.integers(0, VOCAB, documents)
    write_corpus(
        folder,
        (
            3 + (start + stride * np.arange(length)) % (VOCAB - 3)
            for length, stride, start in zip(lengths, strides, starts, strict=True)
        ),
        tokenizer_sha256="none: made of numbers",
        vocab_size=VOCAB,
        special={"pad": 0, "bos": 1, "eod": 2},
        licences={"made up": "CC0"},
        command="k3train drill",
    )


def tiny_run(folder: Path, corpus: Path, layout: str, *, restarts: int = 0) -> Run:
    """A run in ``folder`` over ``corpus/train`` and ``corpus/heldout``, of the layout with this name."""
    spread = LAYOUTS[layout]
    stages = {
        "short": Stage(
            context_tokens=64,
            tokens=STEPS["short"] * BATCH,
            batch_tokens=BATCH,
            micro_batch_sequences=spread.together[0],
        ),
        "long": Stage(
            context_tokens=128,
            tokens=STEPS["long"] * BATCH,
            batch_tokens=BATCH,
            micro_batch_sequences=spread.together[1],
            parallel=spread.second,
        ),
    }
    run = Run(
        name="drill",
        dir=str(folder),
        device=Device.cpu,
        model=Model(
            num_layers=3,
            hidden_size=32,
            num_heads=2,
            vocab_size=VOCAB,
            dense_ffn_size=64,
            mla_every=3,
            kda=Kda(head_dim=16, decay_rank=8),
            mla=Mla(q_lora_rank=16, kv_lora_rank=16, qk_head_dim=16, qk_shared_head_dim=8, v_head_dim=16),
            attn_res=AttnRes(block_layers=2),
            moe=Moe(num_experts=8, top_k=2, expert_ffn_size=16, latent_size=16, shared_ffn_size=16),
        ),
        parallel=spread.parallel,
        optim=Optim(learning_rate=1e-2, min_learning_rate=1e-3),
        data=Data(
            sources={"counting": Source(path=str(corpus / "train"), max_epochs=10)},
            heldout={"heldout": str(corpus / "heldout")},
            pack_window_tokens=8192,
        ),
        curriculum=Curriculum(
            stages=stages, order=list(stages), eval_tokens=256, eval_every_steps=6, eval_one_ahead=False
        ),
        checkpoint=Checkpoint(every_steps=SAVE_EVERY),
        cluster=Cluster(
            ranks_per_node=spread.ranks,
            collective_timeout_seconds=60,
            max_restarts=restarts,
            restart_delay_seconds=0,
        ),
    )
    problems = check(run)
    assert not problems, [str(problem) for problem in problems]
    return run
