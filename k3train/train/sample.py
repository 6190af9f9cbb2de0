"""Continue a prompt with a trained model, on one process, from a checkpoint of any layout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from k3train.backend.start import start_backend, start_processes, stop_processes
from k3train.config.compose import load_resolved
from k3train.config.problems import BadInput
from k3train.config.schema import Fp8, Parallel, Run
from k3train.config.trained import CHECKPOINTS
from k3train.data.corpus import read_manifest
from k3train.data.tokenizer import read_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def sample(
    run_dir: Path,
    *,
    prompt: str,
    num_tokens: int | None = None,
    temperature: float = 0.8,
    seed: int = 0,
    checkpoint: Path | None = None,
) -> str:
    """The prompt and up to ``num_tokens`` tokens after it; stops at the end of the document.

    Takes the run's newest good checkpoint unless ``checkpoint`` names one. ``temperature`` 0 is greedy;
    above it ``seed`` alone decides what is drawn from the model's probabilities.
    ``num_tokens`` is 100, or the longest context of the run's stages where that is shorter, unless given.
    Raises BadInput when there is no run, no checkpoint or no tokenizer, and when ``num_tokens`` is above that
    context.
    """
    resolved = run_dir / "run.yaml"
    if not resolved.exists():
        raise BadInput(f"{resolved} does not exist: give the directory of a run that has started")
    run = load_resolved(resolved)
    longest = max(stage.context_tokens for stage in run.curriculum.stages.values())
    if num_tokens is None:
        num_tokens = min(100, longest)
    elif num_tokens > longest:
        what = "the longest context that the run trains on"
        raise BadInput(f"--tokens {num_tokens} is above {longest}, {what}; use {longest} or less")
    if checkpoint is not None and not checkpoint.exists():
        inside = run_dir / CHECKPOINTS
        raise BadInput(f"--checkpoint {checkpoint} does not exist: give one of those in {inside}, or none")
    tokenizer = _tokenizer(run)
    special = read_manifest(Path(next(iter(run.data.sources.values())).path)).special
    device = start_backend(run.device, threads=torch.get_num_threads())
    start_processes(device, timeout_seconds=60)
    model = _load(run, run_dir, checkpoint, device)
    ids = [special["bos"], *tokenizer.encode(prompt).ids]
    try:
        new = generate(model, ids, num_tokens, temperature, special["eod"], device, seed=seed)
        return tokenizer.decode(ids + new)
    finally:
        stop_processes()


def _tokenizer(run: Run) -> Tokenizer:
    if run.data.tokenizer is None:
        raise BadInput("data.tokenizer = null, and a prompt needs the tokenizer.json that made the corpora")
    tokenizer = read_tokenizer(Path(run.data.tokenizer), f"data.tokenizer = {run.data.tokenizer!r}")
    tokenizer.encode_special_tokens = True  # a prompt that spells one is text
    return tokenizer


@torch.no_grad()
def generate(
    model: Any,
    ids: list[int],
    num_tokens: int,
    temperature: float,
    end: int | None,
    device: torch.device,
    *,
    seed: int,
) -> list[int]:
    """New token ids after ``ids``, from a full forward pass per token; ``end`` is not returned.

    Drawn by a generator of its own: the global ones continue where a checkpoint's run stood.
    """
    from k3train.kernels.packing import make_packing

    generator = torch.Generator().manual_seed(seed)
    model.eval()
    new: list[int] = []
    for _ in range(num_tokens):
        tokens = torch.tensor([ids + new], device=device)
        n = tokens.shape[1]
        logits = model(tokens, make_packing([0, n], torch.ones(n, dtype=torch.bool), device=device))
        token = _pick(logits[0, -1].float().cpu(), temperature, generator)
        if token == end:
            break
        new.append(token)
    return new


def _pick(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    """One token id from logits [vocabulary] on the CPU."""
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))


def _load(run: Run, run_dir: Path, checkpoint: Path | None, device: torch.device) -> Any:
    from k3train.checkpoint.folder import newest_good
    from k3train.checkpoint.load import load_checkpoint
    from k3train.model.build import build_model
    from k3train.model.config import make_config
    from k3train.parallel.groups import start_groups
    from k3train.parallel.layout import make_layout

    path = checkpoint or newest_good(run_dir / CHECKPOINTS)
    if path is None:
        raise BadInput(f"{run_dir / CHECKPOINTS} holds no complete checkpoint yet: train the run first")
    run.model.fp8 = Fp8.none  # a few tokens gain nothing by it, and the package may be missing here
    layout = make_layout(run.model, Parallel(), 1)
    groups = start_groups(layout, seed=run.seed)
    config = make_config(run.model, Parallel(), layout)
    chunks = build_model(run.model, config, layout, groups, device)
    load_checkpoint(path, chunks=chunks, optimizer=None, groups=groups)
    return chunks[0]
