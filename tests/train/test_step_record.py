"""What a step's record says of all ranks, in runs of ranks that are not alike."""

from __future__ import annotations

from pathlib import Path

from k3train.config.schema import Parallel, Run, Stage
from k3train.train.left_out import LEFT_OUT
from tests.ranks import run_ranks
from tests.train.runs import make_run, records, train_rank

STEPS = 3


def short_run(folder: Path, **parallel: int) -> Run:
    """Three steps on two ranks; the third is left out."""
    run = make_run(folder, ranks=2, parallel=Parallel(**parallel))
    run.curriculum.stages = {"short": Stage(context_tokens=128, tokens=STEPS * 512, batch_tokens=512)}
    run.curriculum.order = ["short"]
    run.curriculum.eval_tokens = 128
    Path(run.dir).mkdir()
    (Path(run.dir) / LEFT_OUT).write_text('[{"first": 3, "last": 3, "why": "rollback"}]')
    return run


def _train_on_uneven_ranks(rank: int, run: Run) -> int:
    from k3train.train import step

    step.peak_memory_gib = lambda device: (30.5, 70.25)[rank]
    return train_rank(rank, run)


def test_memory_is_that_of_the_fullest_rank(tmp_path: Path) -> None:
    run = short_run(tmp_path, pp=2)
    assert run_ranks(2, _train_on_uneven_ranks, run, timeout=120) == [0, 0]
    assert [record["memory_gib"] for record in records(run, "step")] == [70.25] * STEPS
