"""What a step's record says of all ranks, in runs of ranks that are not alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3train.config.schema import Parallel, Run, Stage
from k3train.plan.counts import train_flops_per_token
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
    assert run_ranks(2, _train_on_uneven_ranks, run) == [0, 0]
    assert [record["memory_gib"] for record in records(run, "step")] == [70.25] * STEPS


def _train_and_list_documents(rank: int, run: Run) -> list[list[list[int]]]:
    """Of each sequence of each step the lengths of its documents, then of its padding, by the data's own
    account."""
    from k3train.train import loop

    setups, build_as_it_is = [], loop.build_stage

    def build_stage(*arguments):
        setups.append(build_as_it_is(*arguments))
        return setups[-1]

    def lengths(sequence) -> list[int]:
        pieces = [piece.length for piece in sequence]
        return [*pieces, 128 - sum(pieces)]

    loop.build_stage = build_stage
    assert train_rank(rank, run) == 0
    steps = [setups[0].data.documents(step) for step in range(STEPS)]
    return [[lengths(sequence) for sequence in step] for step in steps]


@pytest.mark.parametrize("degree", ["ep", "pp", "tp", "cp"])
def test_flops_and_padding_are_those_of_every_rank_s_documents(tmp_path: Path, degree: str) -> None:
    run = short_run(tmp_path, **{degree: 2})
    steps, _ = run_ranks(2, _train_and_list_documents, run)
    *trained, left_out = records(run, "step")
    assert any(sequence[-1] for step in steps[:-1] for sequence in step)
    for record, step in zip(trained, steps[:-1], strict=True):
        documents = [n for sequence in step for n in sequence]
        assert sum(documents) == 512
        flops = sum(n * train_flops_per_token(run.model, n) for n in documents)
        assert record["model_tflops"] * 1e12 * record["step_seconds"] * 2 == pytest.approx(flops)
        assert record["mfu"] is None
        assert record["padding"] == pytest.approx(sum(sequence[-1] for sequence in step) / 512)
    assert len(trained) == STEPS - 1
    assert left_out["model_tflops"] is None
    assert left_out["padding"] is None
