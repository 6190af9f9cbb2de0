"""Whether a checkpoint belongs to the run that would go on from it, and where the run stands with it."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from typing import Any

from k3train.checkpoint.load import read_train_state
from k3train.checkpoint.manifest import CheckpointError
from k3train.config import history
from k3train.config.build import Builder, to_plain
from k3train.config.compare import check_whole_steps, compare, draws_from, identity_problems
from k3train.config.problems import ConfigError
from k3train.config.schema import Run
from k3train.curriculum.stages import stage_table, total_tokens
from k3train.data.bookmark import may_move_text
from k3train.data.indexed import CorpusError
from k3train.data.same_text import check_same_text
from k3train.optim.schedule import bend
from k3train.train.identity import same_on_every_rank, versions
from k3train.train.progress import Progress
from k3train.train.setup import StageSetup

logger = logging.getLogger(__name__)


def train_state(setup: StageSetup, progress: Progress) -> dict[str, Any]:
    """What a checkpoint keeps besides tensors, as JSON data."""
    stage_steps = setup.plan.steps_done(progress.tokens)
    return {
        **progress.to_json(),
        "stage": setup.plan.name,
        "settings": to_plain(setup.run),
        "versions": versions(setup.run.data.tokenizer),
        "data": {
            "fingerprint": setup.data.fingerprint(),
            "corpora": _drawn(setup),
            "consumed_tokens": setup.data.consumed(stage_steps),
            "positions": setup.data.positions(stage_steps),
            "bookmark": setup.data.bookmark(stage_steps),
        },
    }


def go_on(run: Run, state: dict[str, Any], checkpoint: Path) -> Progress:
    """Where ``run`` stands with ``checkpoint``, whose train state this is.

    Raises ConfigError when it was trained with other settings that decide what is trained. run.yaml tells the
    same, but it can be lost or edited; the checkpoint cannot. When the run has become longer or shorter the
    learning rate goes on from where it is.
    """
    try:
        progress = Progress.from_json(state)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{checkpoint} does not say where its run stands as this k3train writes it ({error!r}): "
            "go on with the version that wrote it"
        ) from error
    builder = Builder()
    trained = builder.build(state.get("settings"))
    if builder.problems:
        logger.warning("%s was written with other settings than this k3train has; not compared", checkpoint)
        return progress
    refused = compare(trained, run, trained_tokens=progress.tokens).refused
    if refused:
        raise ConfigError(identity_problems(refused, run, checkpoint))
    check_whole_steps(run, progress.tokens, checkpoint)
    before, now = (total_tokens(stage_table(each)) for each in (trained, run))
    progress.bends = bend(progress.bends, before, now, progress.tokens)
    return progress


def bookmark_of(checkpoint: Path | None) -> dict[str, Any] | None:
    """The place in the text that ``checkpoint`` keeps, for ``build_stage``; older ones keep none."""
    return None if checkpoint is None else read_train_state(checkpoint).get("data", {}).get("bookmark")


def record_start(run: Run, progress: Progress, state: dict[str, Any] | None) -> dict[str, Any]:
    """Write this start to the run's history; returns what it says, for the metrics. Only one rank.

    ``state`` is the train state that the run goes on from. Other versions than the checkpoint's are allowed;
    they are named here.
    """
    now = versions(run.data.tokenizer)
    then = {} if state is None else state.get("versions", {})
    told = {
        "run_id": history.run_id(Path(run.dir)),
        "changed_versions": {k: f"{then[k]} -> {v}" for k, v in now.items() if then.get(k, v) != v},
        "override": run.resume.override,
        "bends": progress.bends,
    }
    job = {k: v for k in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT") if (v := os.environ.get(k))}
    history.record(
        Path(run.dir), "start", step=progress.step, host=socket.gethostname(), versions=now, **told, **job
    )
    return told


def check_text(setup: StageSetup, progress: Progress, state: dict[str, Any] | None) -> None:
    """Raise CorpusError, on every rank, when the run goes on with other text than the checkpoint whose state
    this is was trained on, or from another place in it; RanksDiffer when a rank sees other text than the
    others. Every rank must call this."""
    same_on_every_rank({"data": setup.data.fingerprint()})
    trained = {} if state is None else state.get("data", {})
    check_same_text(setup.run, trained.get("corpora", {}), setup.data.corpora())
    here = setup.data.positions(setup.plan.steps_done(progress.tokens))
    for name, position in trained.get("positions", {}).items():
        if here.get(name, position) != position and not may_move_text(setup.run):
            raise CorpusError(
                f"data.sources.{name}: this k3train would go on at {here[name]}, and the checkpoint was "
                f"written at {position} (epoch, tokens, tokens given back): use the version that wrote it."
            )


def _drawn(setup: StageSetup) -> dict[str, str]:
    """Hash of the text of each source that this stage or one before draws from."""
    stages = [plan.stage for plan in setup.table[: setup.plan.index + 1]]
    return {name: text for name, text in setup.data.corpora().items() if draws_from(stages, name)}
