"""Held-out loss: of the same sequences on every layout and with every size of micro-batches."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from k3train.config.rules import check
from k3train.config.schema import Run
from k3train.data.batch import MicroBatch
from k3train.data.heldout import heldout
from k3train.train.evaluate import _passes
from tests.ranks import RanksFailed, run_ranks
from tests.train.runs import make_run, records, train_rank, train_run


def _setup(folder: Path, micro_batch_sequences: int, **degrees: int) -> Any:
    """Of a stage what tells its evaluation which sequences to take."""
    run = make_run(folder)
    stage = replace(run.curriculum.stages["short"], micro_batch_sequences=micro_batch_sequences)
    layout = SimpleNamespace(**{"dp": 1, "pp": 1, "vp": 1, **degrees})
    groups = SimpleNamespace(layout=layout, dp_rank=0)
    return SimpleNamespace(run=run, plan=SimpleNamespace(stage=stage), groups=groups)


def _labels(buffers: list[MicroBatch], context: int) -> list[bytes]:
    rows = [row for buffer in buffers for row in buffer.labels.reshape(-1, context)]
    return sorted(row.tobytes() for row in rows if (row >= 0).any())


@pytest.mark.parametrize("context", [128, 256, 1024])
@pytest.mark.parametrize("degrees", [{}, {"dp": 4}, {"pp": 2, "vp": 2}, {"dp": 2, "pp": 3, "vp": 2}], ids=str)
@pytest.mark.parametrize("micro", [1, 2, 4])
def test_the_sequences_that_count_are_the_same_for_all(
    tmp_path: Path, micro: int, degrees: dict[str, int], context: int
) -> None:
    setup = _setup(tmp_path, micro, **degrees)
    wanted = heldout(setup.run, "heldout", context, -(-700 // context))
    layout, ranks = setup.groups.layout, []
    for rank in range(layout.dp):
        setup.groups.dp_rank = rank
        ranks.append(_passes(setup, "heldout", context))
    buffers = [buffer for passes in ranks for host in passes for buffer in host]
    assert _labels(buffers, context) == _labels(wanted, context)
    assert len({len(passes) for passes in ranks}) == 1, "all ranks take part in each pass"
    assert len({len(buffer.tokens) for buffer in buffers}) == 1
    assert len(buffers[0].tokens) <= max(micro * 128, context)
    group = layout.pp if layout.vp > 1 else 1
    assert {len(host) for passes in ranks for host in passes} == {group}


def test_a_pipeline_of_virtual_chunks_evaluates_like_one_rank(tmp_path: Path) -> None:
    alone = make_run(tmp_path, dir=str(tmp_path / "alone"))
    assert train_run(alone) == [0]
    run = make_run(tmp_path)
    run.cluster.ranks_per_node = 2
    run.parallel = replace(run.parallel, pp=2, vp=2)
    run.curriculum.stages["short"].micro_batch_sequences = 2
    run.checkpoint.load_from = f"{alone.dir}/checkpoints/step_00000012"
    assert check(run) == []
    assert train_run(run) == [0, 0]
    expected, found = records(alone, "eval"), records(run, "eval")
    for name in ("step", "context_tokens", "predicted_tokens"):
        assert [each[name] for each in found] == [each[name] for each in expected], name
    of_these_weights = next(each["loss"] for each in expected if each["step"] == 12)
    assert found[0]["loss"] == pytest.approx(of_these_weights, rel=1e-6)


def _ends_when_it_looks_ahead(rank: int, run: Run) -> int:
    from k3train.train import evaluate

    measure = evaluate._heldout_loss

    def measured(setup: Any, name: str, context_tokens: int, stop: Any) -> Any:
        if context_tokens > setup.plan.stage.context_tokens:
            raise RuntimeError("the longer context does not fit")
        return measure(setup, name, context_tokens, stop)

    evaluate._heldout_loss = measured
    return train_rank(rank, run)


def test_a_failure_one_stage_ahead_costs_nothing_that_is_trained(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.checkpoint.every_steps = 0
    with pytest.raises(RanksFailed, match="the longer context does not fit"):
        run_ranks(1, _ends_when_it_looks_ahead, run)
    assert [(e["step"], e["context_tokens"]) for e in records(run, "eval")] == [(0, 128), (12, 128)]
    assert train_run(run) == [0]
    again = [r["step"] for r in records(run, "step") if r["attempt"] == 2]
    assert again == list(range(13, 19))


def _stopped_ahead(rank: int, run: Run) -> int:
    from k3train.train import evaluate

    measure = evaluate._heldout_loss

    def measured(setup: Any, name: str, context_tokens: int, stop: Any) -> Any:
        if context_tokens > setup.plan.stage.context_tokens:
            os.kill(os.getpid(), signal.SIGUSR1)
        return measure(setup, name, context_tokens, stop)

    evaluate._heldout_loss = measured
    return train_rank(rank, run)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_stop_while_looking_ahead_leaves_a_checkpoint_of_its_step(
    tmp_path: Path, asynchronous: bool
) -> None:
    run = make_run(tmp_path)
    run.checkpoint.asynchronous = asynchronous
    # A save is due at the first's step; the last is the stage's end.
    for every_evaluation, step in ((4, 4), (6, 6), (0, 12)):
        run.dir = str(tmp_path / f"run {every_evaluation}")
        run.curriculum.eval_every_steps = every_evaluation
        assert run_ranks(1, _stopped_ahead, run) == [75]
        assert max(r["step"] for r in records(run, "step")) == step
        assert (Path(run.dir) / "checkpoints" / f"step_{step:08d}").is_dir()
        assert [(e["step"], e["context_tokens"]) for e in records(run, "eval")][1:] == [(step, 128)]


def _fails_beyond_a_step(rank: int, run: Run) -> int:
    from k3train.train import schedule

    to_device = schedule.to_device

    def smaller(batch: MicroBatch, **how: Any) -> Any:
        if len(batch.tokens) > 128:
            raise RuntimeError("out of memory")
        return to_device(batch, **how)

    schedule.to_device = smaller
    return train_rank(rank, run)


def test_what_does_not_fit_one_stage_ahead_fails_before_the_first_step(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with pytest.raises(RanksFailed, match="out of memory"):
        run_ranks(1, _fails_beyond_a_step, run)
    assert records(run, "step") == records(run, "eval") == []
