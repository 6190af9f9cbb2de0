"""What ``k3train bench`` measures, says about what it cannot measure, and refuses."""

from __future__ import annotations

import gc
import importlib
import json
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from k3train.__main__ import main
from k3train.bench import program, work
from k3train.bench.items import ITEMS, OURS, PEERS, default_shapes
from k3train.bench.machine import version
from k3train.bench.process import Process
from k3train.bench.record import (
    ABSENT,
    FAILED,
    LATE,
    MEASURED,
    NONE,
    Record,
    Row,
    read_record,
)
from k3train.bench.tuning import compiling, spread
from k3train.bench.work import Work
from k3train.bench.worker import BOTH, FORWARD, Task, measure_shape
from k3train.plan.counts import train_flops_per_token
from tests.ranks import run_ranks

CEILINGS = {"copy_gb_s": 10.0, "matmul_tflop_s": 0.05}
SMALL = {
    "kda": {"tokens": 96, "heads": 1, "documents": 3, "batch": 1, "head_dim": 16},
    "mla": {"tokens": 32, "heads": 1, "documents": 1, "qk": 12, "v": 8},
}


def measured(rank: int) -> list[Row]:
    """Every item by everyone who is here, at tiny shapes."""
    rows: list[Row] = []
    for item in ITEMS:
        shape = dict(SMALL.get(item) or default_shapes(item, "cpu")[0])
        for by in (OURS, "megatron"):
            if by == OURS or by in ITEMS[item].peers:
                task = Task(item=item, by=by, shapes=[shape], device="cpu", out="")
                make = importlib.import_module(f"k3train.bench.case_{item}").case
                measure_shape(task, shape, make, torch.device("cpu"), rows.append, seconds=0.0)
                gc.collect()
    return rows


def test_every_item_is_measured_forward_and_backward() -> None:
    (rows,) = run_ranks(1, measured, timeout=200)
    assert {row.status for row in rows} == {MEASURED}, [row.reason for row in rows if row.reason]
    seen = {(row.item, row.by, row.what) for row in rows}
    contenders = {
        (item, by) for item in ITEMS for by in (OURS, "megatron") if by in (OURS, *ITEMS[item].peers)
    }
    assert seen >= {(item, by, what) for item, by in contenders for what in (FORWARD, BOTH)}
    for row in rows:
        assert row.low is not None
        assert row.high is not None
        assert row.ms is not None
        assert 0 < row.low <= row.ms <= row.high
        assert (row.routing == "natural") == ITEMS[row.item].routed, row
        assert row.peak_gib > 0.01
    for row in (program.set_against_floor(row, CEILINGS) for row in rows):
        if row.what not in (FORWARD, BOTH):
            continue
        forward, backward = ITEMS[row.item].count(row.shape, 4)
        counted = forward + backward if row.what == BOTH else forward
        floor = max(counted.bytes / 10.0e9, counted.flops / 0.05e12)
        assert row.floor_ms == pytest.approx(1e3 * floor)
        assert row.ratio == pytest.approx(row.ms / row.floor_ms)
        assert row.tflop_s == pytest.approx(counted.flops / row.ms / 1e9)
        assert row.gb_s == pytest.approx(counted.bytes / row.ms / 1e6)


def test_a_peer_that_only_runs_on_gpus_says_so() -> None:
    rows: list[Row] = []
    shape = {"rows": 4, "channels": 8}
    task = Task(item="situ", by="automodel", shapes=[shape], device="cpu", out="")
    make = importlib.import_module("k3train.bench.case_situ").case
    measure_shape(task, shape, make, torch.device("cpu"), rows.append)
    assert [(row.status, row.what) for row in rows] == [(NONE, FORWARD)]
    assert "GPUs only" in rows[0].reason


def test_what_goes_wrong_in_a_call_is_a_row() -> None:
    rows: list[Row] = []
    shape = {"tokens": 8, "hidden": 4, "sources": 0}
    task = Task(item="attn_res", by=OURS, shapes=[shape], device="cpu", out="")
    make = importlib.import_module("k3train.bench.case_attn_res").case
    measure_shape(task, shape, make, torch.device("cpu"), rows.append)
    assert [row.status for row in rows] == [FAILED]
    assert rows[0].reason.startswith("IndexError")


def test_counts_of_kda_are_those_of_the_design() -> None:
    shape = {"tokens": 1, "heads": 1, "documents": 1, "batch": 1, "head_dim": 128}
    forward, backward = work.kda(shape, 2)
    assert (forward.bytes, backward.bytes) == (1282, 2308)
    assert (forward.flops, backward.flops) == (163_840, 442_368)


def test_counts_of_the_whole_model_are_the_planner_s() -> None:
    from k3train.config.compose import compose

    shape = {"tokens": 64, "documents": 2, "proxy": 0}
    forward, backward = ITEMS["model"].count(shape, 4)
    model = compose(["experiment=debug"]).model
    assert forward.flops + backward.flops == pytest.approx(128 * train_flops_per_token(model, 64))


def test_floor_is_the_larger_of_two_times() -> None:
    assert Work(flops=2e12, bytes=1e9).floor_ms(copy_gb_s=1000, matmul_tflop_s=100) == pytest.approx(20)
    assert Work(flops=2e9, bytes=1e10).floor_ms(copy_gb_s=1000, matmul_tflop_s=100) == pytest.approx(10)


def test_attention_of_documents_counts_only_what_a_token_sees() -> None:
    one = {"tokens": 64, "heads": 2, "documents": 1, "qk": 12, "v": 8}
    whole, cut = work.mla(one, 2)[0], work.mla({**one, "documents": 4}, 2)[0]
    assert cut.flops == whole.flops / 4
    assert cut.bytes == whole.bytes


def request(**changes) -> program.Request:
    """One small item and all peers on the CPU."""
    base = program.Request(
        shapes={"situ": [{"rows": 4, "channels": 8}, {"rows": 8, "channels": 8}]},
        peers=list(PEERS),
        device="cpu",
        budget_seconds=100,
        item_seconds=100,
        settings=0,
        command="k3train bench situ",
    )
    return replace(base, **changes)


def test_absent_peers_and_parts_that_a_peer_lacks_are_rows(tmp_path: Path) -> None:
    record = Record(made={})
    tasks = program._tasks(record, request(), tmp_path)
    installed = [by for by in ("automodel",) if version(PEERS[by])]
    assert [task.by for task in tasks] == [OURS, *installed]
    assert {(row.by, row.status) for row in record.rows} >= {("fla", NONE), ("megatron", NONE)}
    lacking = [row for row in record.rows if row.by == "automodel"]
    if not installed:
        assert [row.status for row in lacking] == [ABSENT, ABSENT]
        assert "nemo-automodel is not installed" in lacking[0].reason


def test_rows_that_the_budget_leaves_out_say_so(tmp_path: Path) -> None:
    asked = request(peers=[])
    tasks = program._tasks(Record(made={}), asked, tmp_path)
    (rows,) = program._measure(tasks, {}, asked, deadline=time.monotonic())
    assert {row.status for row in rows} == {LATE}
    assert len(rows) == 4
    assert "budget of 100 s" in rows[0].reason


def test_a_process_that_does_not_end_costs_only_its_rows(tmp_path: Path) -> None:
    asked = request(peers=[], item_seconds=0.3)
    (task,) = program._tasks(Record(made={}), asked, tmp_path)
    done = Row(item="situ", shape=task.shapes[0], by=OURS, what=FORWARD, status=MEASURED, ms=1.0)
    Path(task.out).write_text(json.dumps({"item": "situ", "shape": done.shape, "by": OURS, "what": FORWARD,
                                          "status": MEASURED, "ms": 1.0}) + "\n")  # fmt: skip
    (rows,) = program._measure([task], {}, asked, deadline=time.monotonic() + 100)
    assert rows[0] == done
    assert [row.status for row in rows[1:]] == [FAILED] * 3
    assert rows[1].reason == "did not end within 0.3 s"


def test_settings_are_spread_from_the_first_to_the_last() -> None:
    assert spread(list(range(18)), 4) == [0, 6, 11, 17]
    assert spread([1, 2], 4) == [1, 2]
    assert spread([1, 2, 3], 0) == [1, 2, 3]
    assert spread([1, 2, 3], 1) == [1]


def test_the_command_measures_writes_prints_and_compares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "one" / "a.json"
    command = ["bench", "situ", "--shape", "rows=64,channels=8", "--device", "cpu", "--out", str(out)]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "situ rows=64,channels=8 float32" in printed
    assert "megatron-core has no such part of its own" in printed
    body = json.loads(out.read_text())
    assert body["format"] == "k3train bench 1"
    assert body["ceilings"]["copy_gb_s"] > 0
    assert body["made"]["machine"]["torch"] == torch.__version__
    assert body["made"]["command"].startswith("k3train bench situ --shape")
    assert [row["what"] for row in body["rows"] if row["by"] == OURS] == [FORWARD, BOTH]
    assert main(["bench", "show", str(out)]) == 0
    assert capsys.readouterr().out.strip() in printed
    record = read_record(out)
    for row in record.rows:
        if row.ms is not None:
            row.ms, row.low, row.high = row.ms * 2, row.high * 2, row.high * 2
    record.write(tmp_path / "b.json")
    assert main(["bench", "show", str(out), str(tmp_path / "b.json")]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "rows=64,channels=8" in line]
    assert len(lines) == 2
    assert all("2.000" in line and line.rstrip().endswith("yes") for line in lines)


def test_listing_names_every_item(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    printed = capsys.readouterr().out
    assert [item for item in ITEMS if f"\n  {item} --shape " not in printed] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["kda,atn_res"], "'atn_res' cannot be benchmarked; did you mean attn_res?"),
        (["everything"], "cannot be benchmarked; there are kda"),
        (["kda", "--shape", "tokns=8"], "did you mean tokens?"),
        (["kda", "--shape", "tokens=-8"], "tokens must be a whole number from 1 to 1099511627776"),
        (["situ", "--shape", "rows=99999999999999"], "rows must be a whole number from 1 to 1099511627776"),
        (["situ", "--shape", "rows=" + 5000 * "9"], "rows must be a whole number from 1 to 1099511627776"),
        (["situ", "--shape", "rows=5,rows=6"], "--shape rows=5,rows=6: rows is given twice"),
        (["kda", "--audit", "--shape", "tokens=64", "--shape", "tokens=128"], "give --shape once"),
        (["kda", "--audit", "--shape", "tokens=32"], "use tokens=64 or more"),
        (["kda", "--audit", "--shape", "tokens=64,documents=2"], "leave documents out"),
        (["kda", "--shape", "tokens"], "tokens must be a whole number"),
        (["kda", "--shape", "tokens=10,documents=3"], "tokens=10 are not divisible by documents=3"),
        (["kda", "--shape", "tokens=8,documents=2,batch=2"], "documents lie in one row"),
        (["router", "--shape", "experts=4,top_k=4"], "top_k=4 must be below experts=4"),
        (["model", "--shape", "proxy=2"], "proxy must be 0"),
        (["all", "--shape", "tokens=8"], "--shape needs one item"),
        (["kda", "--peers", "fla,automodl"], "did you mean automodel?"),
        (
            ["situ", "--peers", "none,fla"],
            "--peers none,fla: none stands alone; use --peers none, or name peers",
        ),
        (["situ", "--peers", "fla,auto"], "--peers fla,auto: auto stands alone"),
        (["show", "{tmp}/times.json", "--device", "cpu"], "--device has no effect on show"),
        (["show", "{tmp}/times.json", "--item-seconds", "3"], "--item-seconds has no effect on show"),
        (["kda", "--budget", "0"], "--budget 0 is no length of time"),
        (["kda", "--item-seconds", "nan"], "--item-seconds nan is no length of time"),
        (["kda", "--settings", "-1"], "--settings -1 is negative"),
        (["kda", "situ"], "separated by commas, such as kda,situ"),
        (["situ", "--audit"], "--audit is for kda"),
        (["kda", "--gate-lower-bound", "-4"], "belongs to --audit"),
        (["kda", "--audit", "--gate-lower-bound", "0"], "use a number below 0"),
        (
            ["kda", "--audit", "--gate-lower-bound=-1e-300"],
            "-1e-300 is no bound of a log decay; use a number",
        ),
        (["kda", "--audit", "--gate-lower-bound", "-8"], "has 22 tokens, 16 as a power of two"),
        (["show"], "one file to print or two to compare"),
        (["show", "{tmp}/missing.json"], "missing.json does not exist; give a file"),
        (["show", "{tmp}/text.json"], "cannot be read as JSON"),
        (["show", "{tmp}/nested.json"], "cannot be read as JSON"),
        (["show", "{tmp}/other.json"], "was not written by k3train bench"),
        (["show", "{tmp}/cut.json"], "is damaged"),
        (["show", "{tmp}/times.json", "{tmp}/audit.json"], "audit.json have no measured row in common"),
        (["kda", "--device", "cpu", "--out", "{tmp}"], "is a folder"),
        (["kda", "--device", "cpu", "--out", "{tmp}/times.json"], "times.json exists and would be replaced"),
    ],
)
def test_mistakes_are_named_in_one_sentence(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.json").write_text("hello")
    (tmp_path / "nested.json").write_text("[" * 200_000)
    (tmp_path / "other.json").write_text("[1]")
    (tmp_path / "cut.json").write_text('{"format": "k3train bench 1", "made": {}}')
    row = Row(item="situ", shape={"rows": 4, "channels": 8}, by=OURS, what=FORWARD, status=MEASURED, ms=1.0)
    Record(made={}, rows=[row]).write(tmp_path / "times.json")
    Record(made={}, audit={}).write(tmp_path / "audit.json")
    assert main(["bench", *(word.replace("{tmp}", str(tmp_path)) for word in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kda", "--device", "cuda"]) == 3
    assert "torch sees no GPU" in capsys.readouterr().err


def test_compiling_ahead_leaves_triton_as_it_was() -> None:
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    before = Autotuner.run, JITFunction.run
    with compiling(1, 4, launch=False):
        assert Autotuner.run is not before[0]
        assert JITFunction.run is not before[1]
    assert (Autotuner.run, JITFunction.run) == before


def test_processes_that_start_together_measure_one_after_another(tmp_path: Path) -> None:
    shapes = {"situ": [{"rows": 4, "channels": 8}], "attn_res": [{"tokens": 4, "hidden": 8, "sources": 2}]}
    asked = request(peers=[], shapes=shapes, budget_seconds=1)
    tasks = program._tasks(Record(made={}), asked, tmp_path)
    patient = replace(asked, budget_seconds=100)
    started = program._start_all(tasks[1:], patient)
    assert all(process.ready.is_set() for process in started.values())
    rows = [row for rows in program._measure(tasks, started, patient, time.monotonic() + 100) for row in rows]
    assert [row.item for row in rows] == ["attn_res", "attn_res", "situ", "situ"]
    assert {row.status for row in rows} == {MEASURED}


def test_a_process_that_compiles_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Halted, it would keep the device's memory from the others."""
    made: list[program.Process] = []
    monkeypatch.setattr(program, "Process", lambda task: made.append(Process(task)) or made[-1])
    asked = request(peers=[], shapes={"situ": [{"rows": 4, "channels": 8}]}, budget_seconds=0.01)
    assert program._start_all(program._tasks(Record(made={}), asked, tmp_path), asked) == {}
    assert made[0].process.poll() == -signal.SIGKILL
