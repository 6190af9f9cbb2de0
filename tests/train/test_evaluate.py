"""Held-out loss: of the same sequences on every layout and with every size of micro-batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from k3train.config.rules import check
from k3train.data.batch import MicroBatch
from k3train.data.heldout import heldout
from k3train.train.evaluate import _passes
from tests.train.runs import make_run, records, train_run


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
    assert train_run(run, timeout=200) == [0, 0]
    expected, found = records(alone, "eval"), records(run, "eval")
    for name in ("step", "context_tokens", "predicted_tokens"):
        assert [each[name] for each in found] == [each[name] for each in expected], name
    of_these_weights = next(each["loss"] for each in expected if each["step"] == 12)
    assert found[0]["loss"] == pytest.approx(of_these_weights, rel=1e-6)
