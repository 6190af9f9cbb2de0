"""The sweep: its points, their folders, and that each is trained once by a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import sweep

from k3train.config.keys import flattened
from k3train.config.overrides import GROUPS
from k3train.config.problems import ConfigError

ROOT = Path(__file__).parents[2]


def test_commas_separate_values_except_inside_quotes_and_brackets() -> None:
    assert sweep.split_values("1e-3,2e-3") == ["1e-3", "2e-3"]
    assert sweep.split_values("[1,2],[3]") == ["[1,2]", "[3]"]
    assert sweep.split_values("{a: 1, b: [2,3]}") == ["{a: 1, b: [2,3]}"]
    assert sweep.split_values("'a,b',\"c,d\"") == ["'a,b'", '"c,d"']
    assert sweep.split_values("") == [""]


def test_every_combination_is_a_point_with_its_own_name_and_folder() -> None:
    found = sweep.points(["experiment=debug", "optim.weight_decay=0.05,0.1", "seed=1,2"], None)
    assert [point.run.dir for point in found] == [
        f"runs/debug-sweep/weight_decay-{decay}_seed-{seed}" for decay in ("0.05", "0.1") for seed in (1, 2)
    ]
    assert [(point.run.optim.weight_decay, point.run.seed) for point in found] == [
        (0.05, 1),
        (0.05, 2),
        (0.1, 1),
        (0.1, 2),
    ]


def test_a_name_and_folder_of_one_s_own_are_the_stem_of_the_points() -> None:
    found = sweep.points(["name=mine", "dir=/data/x", "seed=1,2"], None)
    assert [(point.run.name, point.run.dir) for point in found] == [
        ("mine-sweep/seed-1", "/data/x-sweep/seed-1"),
        ("mine-sweep/seed-2", "/data/x-sweep/seed-2"),
    ]


def test_point_names_are_plain_distinct_and_stable() -> None:
    assert sweep.point_name([("optim.beta1", "0.9"), ("optim.beta2", "0.95")]) == "beta1-0.9_beta2-0.95"
    assert sweep.point_name([("a.x", "1"), ("b.x", "2")]) == "a.x-1_b.x-2"
    names = {sweep.point_name([("model.mla_layers", value)]) for value in ("[1,2]", "[1-2]", "'1,2'")}
    assert len(names) == 3
    assert all("/" not in name and " " not in name and len(name) <= 100 for name in names)
    assert len(sweep.point_name([("name", "x" * 300)])) <= 100


def test_no_two_settings_share_a_folder_and_simple_names_stay() -> None:
    def name(key: str) -> str:
        return sweep.point_name([(key, "1")])

    short, long = (name(f"curriculum.stages.{stage}.learning_rate.peak") for stage in ("s64", "s256"))
    assert (short, long) == ("stages.s64.learning_rate.peak-1", "stages.s256.learning_rate.peak-1")
    assert name("seed") == "seed-1"
    assert name("optim.learning_rate") == name("++optim.learning_rate") == "learning_rate-1"
    assert name("model.moe.router.rule") == "rule-1"
    assert name("parallel.tp") == "parallel.tp-1"
    assert name("curriculum.stages.s64.parallel.tp") == "stages.s64.parallel.tp-1"
    assert name("data.heldout.seed") == "heldout.seed-1"
    assert name("optim") == "optim-1"
    # With one name for all that the user may choose, other than any that the schema has.
    keys = [key.replace("*", "mine") for key in flattened()]
    assert len({name(key) for key in [*keys, *GROUPS]}) == len(keys) + len(GROUPS)


def test_a_wrong_point_stops_the_sweep_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="Did you mean seed"):
        sweep.points(["optim.weight_decay=0.05,0.1", "sed=1,2"], None)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("seed=1,1", "'seed=1,1' gives 1 twice, and both would be the same run. Leave one out"),
        ("seed=1,2, 1", "gives 1 twice"),
        ("seed=1,", "'seed=1,' has a comma with no value beside it. Leave the comma out"),
        ("name=,a", "has a comma with no value"),
    ],
)
def test_values_that_make_no_two_runs(override: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep.main(["experiment=debug", override, "--list"]) == 2
    assert said in capsys.readouterr().err


# A Python that instead of training writes what it was asked and ends as its seed says.
STAND_IN = """#!/bin/sh
''''exec "{python}" "$0" "$@" #'''
import json, os, sys, time
with open(os.environ["SWEEP_LOG"], "a") as file:
    file.write(json.dumps([os.getsid(0) == os.getpid(), *sys.argv[1:]]) + "\\n")
if "seed=2" in sys.argv:
    sys.exit(3)
if "seed=6" in sys.argv or "seed=7" in sys.argv:
    print("waits for the other", flush=True)
    for _ in range(6000):
        if len(open(os.environ["SWEEP_LOG"]).readlines()) == 2:
            sys.exit(0)
        time.sleep(0.01)
    sys.exit(9)
if "seed=4" in sys.argv:
    import signal
    signal.signal(signal.SIGINT, lambda *_: sys.exit(75))
    print("training", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    program = tmp_path / "python"
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    return program


def start(stand_in: Path, *arguments: str) -> subprocess.Popen[str]:
    code = f"import sys, sweep; sys.executable = {str(stand_in)!r}; sys.exit(sweep.main(sys.argv[1:]))"
    path = os.pathsep.join([str(ROOT), str(ROOT / "launch")])
    environment = os.environ | {"PYTHONPATH": path, "SWEEP_LOG": str(stand_in.with_name("log"))}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], env=environment, text=True, stdout=subprocess.PIPE
    )


def asked(stand_in: Path) -> list[list[object]]:
    return [json.loads(line) for line in stand_in.with_name("log").read_text().splitlines()]


def test_points_run_one_by_one_and_a_failure_does_not_keep_the_next_from_running(stand_in: Path) -> None:
    process = start(stand_in, "seed=1,2,3")
    output = process.communicate(timeout=200)[0]
    assert process.returncode == 3
    assert asked(stand_in) == [
        [
            True,
            "-m",
            "k3train",
            "train",
            f"seed={n}",
            f"name=debug-sweep/seed-{n}",
            f"dir=runs/debug-sweep/seed-{n}",
        ]
        for n in (1, 2, 3)
    ]
    assert [line.split() for line in output.splitlines()[-4:]] == [
        ["done", "runs/debug-sweep/seed-1"],
        ["failed", "with", "code", "3", "runs/debug-sweep/seed-2"],
        ["done", "runs/debug-sweep/seed-3"],
        "what a run has reached: python launch/summary.py runs/debug-sweep/seed-1".split(),
    ]


def test_an_interrupt_reaches_the_running_point_and_ends_the_sweep(stand_in: Path) -> None:
    process = start(stand_in, "seed=4,5")
    assert process.stdout is not None
    assert any("training" in line for line in process.stdout), "the point did not start"
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=200)[0]
    assert process.returncode == 75
    assert "the same command again goes on here" in output
    assert len(asked(stand_in)) == 1


def test_jobs_run_side_by_side_and_print_into_files(stand_in: Path, tmp_path: Path) -> None:
    process = start(stand_in, "seed=6,7", f"dir={tmp_path}/run", "--jobs", "2")
    output = process.communicate(timeout=200)[0]
    assert process.returncode == 0, output
    for n in (6, 7):
        assert (tmp_path / f"run-sweep/seed-{n}.log").read_text() == "waits for the other\n"
    assert "waits for" not in output


def test_points_whose_folder_cannot_be_made_fail_with_a_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    words = ["curriculum=short", "device=cpu", f"dir={tmp_path}/file/run", "seed=1,2", "--jobs", "2"]
    assert sweep.main(words) == 3
    out, err = capfd.readouterr()
    for n in (1, 2):
        assert f"dir = {tmp_path}/file/run-sweep/seed-{n} cannot hold the run: " in err
        assert f"failed with code 3  {tmp_path}/file/run-sweep/seed-{n}" in out
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("options", "said"), [(["--jobs", "0"], "at least 1"), (["--jobs", "2", "--slurm"], "this machine")]
)
def test_jobs_that_cannot_be(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sweep.main(["seed=1,2", *options])
    assert said in capsys.readouterr().err


def test_slurm_renders_one_job_per_point(capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep.main(["seed=1,2", "--slurm", "--sbatch=--exclusive"]) == 0
    printed, said = capsys.readouterr()
    assert said.count("device = auto: ") == 1
    assert printed.count("#!/bin/bash\n") == 2
    assert printed.count("#SBATCH --exclusive\n") == 2
    for seed in (1, 2):
        assert f'#SBATCH --job-name="debug-sweep/seed-{seed}"' in printed
