"""A tiny corpus with something to learn and a run of two stages over it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

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
    Run,
    Source,
    Stage,
    StageParallel,
)
from k3train.data.corpus import file_sha256
from k3train.drill import tiny
from k3train.drill.tiny import VOCAB
from k3train.monitor.metrics_file import METRICS
from tests.ranks import run_ranks

make_corpus = partial(tiny.make_corpus, below_tokens=200)


def small_model() -> Model:
    """Every kind of layer, as small as it goes."""
    return Model(
        num_layers=5,
        hidden_size=32,
        num_heads=2,
        vocab_size=VOCAB,
        dense_ffn_size=64,
        kda=Kda(head_dim=16, decay_rank=8),
        mla=Mla(q_lora_rank=16, kv_lora_rank=16, qk_head_dim=16, qk_shared_head_dim=8, v_head_dim=16),
        attn_res=AttnRes(block_layers=2),
        moe=Moe(num_experts=8, top_k=2, expert_ffn_size=16, latent_size=16, shared_ffn_size=16),
    )


def make_run(folder: Path, *, ranks: int = 1, **changes: object) -> Run:
    """Two stages, 128 and 256 tokens of context; on two ranks the second changes from dp 2 to cp 2."""
    corpus = folder / "corpus"
    if not corpus.exists():
        make_corpus(corpus / "train", documents=300, seed=1)
        make_corpus(corpus / "heldout", documents=40, seed=2)
    stages = {
        "short": Stage(context_tokens=128, tokens=12 * 512, batch_tokens=512),
        "long": Stage(
            context_tokens=256,
            tokens=6 * 512,
            batch_tokens=512,
            parallel=StageParallel(cp=2) if ranks == 2 else StageParallel(),
        ),
    }
    settings: dict = {
        "name": "test",
        "dir": str(folder / "run"),
        "device": Device.cpu,
        "model": small_model(),
        "optim": Optim(learning_rate=1e-2, min_learning_rate=1e-3),
        "data": Data(
            sources={"counting": Source(path=str(corpus / "train"), max_epochs=10)},
            heldout={"heldout": str(corpus / "heldout")},
            pack_window_tokens=8192,
        ),
        "curriculum": Curriculum(stages=stages, order=list(stages), eval_tokens=700),
        "checkpoint": Checkpoint(every_steps=4),
        "cluster": Cluster(ranks_per_node=ranks, collective_timeout_seconds=60),
    }
    return Run(**{**settings, **changes})


def give_tokenizer(run: Run) -> None:
    """Give ``run``, whose corpus has none, a tokenizer of words: ``w5`` is token 5."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    corpus = Path(next(iter(run.data.sources.values())).path).parent
    path = corpus / "tokenizer.json"
    words = {f"w{number}": number for number in range(VOCAB - 1)}
    counting: Any = Tokenizer(models.WordLevel({**words, "?": VOCAB - 1}, unk_token="?"))
    counting.pre_tokenizer = pre_tokenizers.Whitespace()
    counting.save(str(path))
    run.data.tokenizer = str(path)
    for manifest in corpus.glob("*/manifest.json"):
        made_with = json.loads(manifest.read_text())
        manifest.write_text(json.dumps({**made_with, "tokenizer_sha256": file_sha256(path)}))


def train_rank(rank: int, run: Run) -> int:
    """One rank of ``run``; returns its exit code."""
    from k3train.train.loop import train

    return train(run, torch.device("cpu"))


def train_run(run: Run) -> list[int]:
    """Train to the end on the run's own number of ranks; returns their exit codes."""
    return run_ranks(run.cluster.ranks_per_node, train_rank, run)


def records(run: Run, kind: str) -> list[dict]:
    """Records of one kind in the order they were written."""
    lines = (Path(run.dir) / METRICS).read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["kind"] == kind]


def losses(run: Run) -> dict[int, float]:
    """The last loss that was recorded for each step."""
    return {record["step"]: record["loss"] for record in records(run, "step")}
