"""The drill: a short one with real ranks, and that it would see what it looks for."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from k3train.__main__ import main
from k3train.config.problems import BadInput
from k3train.config.schema import Run
from k3train.drill.bench import read_trained
from k3train.drill.kills import FIRST_RANK_ONLY, MOMENTS, WRITERS, plan_of_kills
from k3train.drill.matrix import ROWS
from k3train.drill.program import RESULTS, _spread, chosen, drill
from k3train.drill.watch import Watch
from k3train.faults import POINTS, read_plan
from k3train.monitor.metrics_file import METRICS
from tests.train.runs import make_run, train_run

ROOT = Path(__file__).parents[2]


def test_killed_runs_train_the_golden_run_s_bits_and_the_table_says_so(tmp_path: Path) -> None:
    words = [
        "--kills",
        "4",
        "--seed",
        str(random.randrange(10**6)),
        "--faults",
        "exception",
        "--dir",
        str(tmp_path),
    ]
    result = subprocess.run(
        [sys.executable, "-m", "k3train", "drill", *words],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    results = json.loads((tmp_path / RESULTS).read_text())
    assert [(row["name"], row["as_expected"]) for row in results["rows"]] == [("exception", True)]
    storm = results["kills"]
    assert sum(storm["kills"].values()) == 4
    assert (storm["mismatches"], storm["lost"], storm["orphans"], storm["failed"]) == (0, 0, 0, [])
    assert "losses that differ from the golden run" in result.stdout


def starts_ranks(folder: Path) -> bool:
    """The fork server reads the ranks' imports, which takes seconds."""
    return any(folder.glob("k3train-drill-*/run-001/logs"))


def trains(folder: Path) -> bool:
    return any("step" in file.read_text() for file in folder.glob(f"k3train-drill-*/run-001/{METRICS}"))


@pytest.mark.parametrize("moment", [starts_ranks, trains])
def test_ctrl_c_stops_the_drill_and_all_it_started(tmp_path: Path, moment: Callable[[Path], bool]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "k3train", "drill", "--faults", "kill,settings", "--kills", "20"],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    started = psutil.Process(process.pid)
    until = time.monotonic() + 250
    while not moment(tmp_path) and process.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    family = started.children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    output, said = process.communicate(timeout=250)
    assert (process.returncode, output) == (1, "")
    assert said == "interrupted: the drill has stopped, without a verdict\n"
    assert family
    alive = [each for each in family if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    assert not alive
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kills", "0"], "--kills: 0 is no number of kills; use 1 or more"),
        (["--kills", "-3"], "--kills: -3 is no number of kills; use 1 or more"),
        (["--kills", "1", "--seed", "-1"], "--seed: -1 is negative; use 0 or more"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["drill", "--list", *words])
    assert said in capsys.readouterr().err


def test_no_percentile_lies_beyond_the_values() -> None:
    assert _spread([0.09, 0.11, 0.13]) == (0.11, pytest.approx(0.128), 0.13)
    values = [random.random() for _ in range(200)]
    middle, high, worst = _spread(values)
    assert (middle, worst) == (statistics.median(values), max(values))
    assert sorted(values)[188] <= high <= sorted(values)[190]
    assert _spread([]) == (0.0, 0.0, 0.0)
    assert _spread([2.0]) == (2.0, 2.0, 2.0)


def metrics(folder: Path, records: list[dict]) -> Run:
    folder.mkdir()
    lines = [json.dumps({"attempt": 1, **record}) for record in records]
    (folder / METRICS).write_text("\n".join(lines) + "\n")
    return Run(dir=str(folder))


def step(number: int, loss: float, attempt: int = 1) -> dict:
    return {"kind": "step", "step": number, "loss": loss, "attempt": attempt}


def event(name: str, number: int, attempt: int = 1) -> dict:
    return {"kind": "event", "event": name, "step": number, "attempt": attempt}


def test_one_bit_a_missing_step_and_a_forgotten_checkpoint_are_seen(tmp_path: Path) -> None:
    begin = [event("stage_start", 0), step(1, 0.1), step(2, 0.2), event("checkpoint", 2), step(3, 0.3)]
    golden = read_trained(metrics(tmp_path / "golden", [*begin, step(4, 0.4)]))
    again = [event("resume", 2, 2), step(3, 0.3, 2), step(4, 0.4, 2)]
    good = read_trained(metrics(tmp_path / "good", [*begin, *again]))
    assert (good.differ_from(golden), good.lost_checkpoints(), good.lost_steps()) == (0, 0, 1)
    again[1]["loss"] = 0.30000000000000004
    bad = read_trained(metrics(tmp_path / "bad", [*begin, *again]))
    assert bad.differ_from(golden) == 1
    short = read_trained(metrics(tmp_path / "short", begin))
    assert short.differ_from(golden) == 1
    older = read_trained(metrics(tmp_path / "older", [*begin, event("stage_start", 0, 2), *begin[1:3]]))
    assert (older.lost_checkpoints(), older.lost_steps()) == (1, 3)


def test_an_instant_without_a_good_checkpoint_is_seen(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.curriculum.order = ["short"]
    train_run(run)
    folder = Path(run.dir) / "checkpoints"
    with Watch(folder) as watch:
        pass
    assert (watch.looks, watch.without) == (watch.looks, 0)
    with Watch(folder) as watch:
        while not watch.looks:
            pass
        for path in folder.glob("step_*/MANIFEST.json"):
            path.write_bytes(path.read_bytes().replace(b"1", b"2"))
    assert watch.without > 0
    shutil.rmtree(folder)
    with Watch(folder) as watch:  # before the first, none is missed
        pass
    assert watch.without == 0


def test_kills_are_spread_and_their_plans_are_plans(tmp_path: Path) -> None:
    faults, moments = plan_of_kills(random.Random(1), ranks=3, count=300, asynchronous=False)
    (tmp_path / "plan.json").write_text(json.dumps({"faults": faults}))
    read, _ = read_plan(tmp_path / "plan.json")
    assert [fault.restart for fault in read] == list(range(300))
    assert set(moments.values()) == set(MOMENTS)
    beside, _ = plan_of_kills(random.Random(1), ranks=3, count=300, asynchronous=True)
    of_ranks = [fault["restart"] for fault in beside if fault["point"] not in WRITERS]
    assert of_ranks == list(range(300)), "every start ends, that of a killed writer too"
    assert len(beside) > 300
    assert {fault.rank for fault in read} == {0, 1, 2}
    assert {fault.rank for fault in read if fault.point in FIRST_RANK_ONLY} == {0}
    assert {name for points in MOMENTS.values() for name, _ in points} <= set(POINTS)


def test_rows_are_chosen_by_name() -> None:
    assert [row.name for row in chosen("sigterm,kill")] == ["sigterm", "kill"]
    assert len({row.name for row in ROWS}) == len(ROWS)
    with pytest.raises(BadInput, match="--faults kil is not a row of the drill; did you mean kill"):
        chosen("kill,kil")
    with pytest.raises(BadInput, match="--faults names no row of the drill; there are kill, exception"):
        chosen("")


def test_a_folder_with_earlier_runs_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run-001").mkdir()
    with pytest.raises(BadInput, match=r"--dir .* holds files, and"):
        drill([], kills=1, seed=0, folder=tmp_path)
