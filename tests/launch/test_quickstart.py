"""quickstart.sh: which steps it takes for a new, an interrupted, a finished and a failing run.

The environment's Python is a stand-in for ``-m k3train`` only; launch/summary.py, which quickstart asks for
the run's state, is run by the real one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from k3train.config.compose import compose, save_resolved
from k3train.curriculum.stages import stage_table
from tests.saved import save_checkpoint

ROOT = Path(__file__).parents[2]

PYTHON = """#!/bin/bash
if [ "$1 $2" != "-m k3train" ]; then PYTHONPATH="{root}" exec "{python}" "$@"; fi
shift 2
echo "$*" >> "{log}"
case "$1" in
  train)
    mkdir -p "{dir}/checkpoints"
    cp -r "{dir}/../checkpoints/step_{last}" "{dir}/checkpoints"
    cp "{dir}/../run.yaml" "{dir}"
    echo '{{"kind": "event", "event": "done", "attempt": 1}}' > "{dir}/metrics.jsonl"
    exit "${{TRAIN_CODE:-0}}" ;;
  data) exit "${{DATA_CODE:-0}}" ;;
esac
"""


class Quickstart:
    """quickstart.sh over an environment that is already installed."""

    def __init__(self, folder: Path) -> None:
        self.dir = folder / "my run"
        self.venv = folder / "venv"
        self.log = folder / "calls"
        run = compose(["experiment=debug"])
        save_resolved(run, folder / "run.yaml")
        last = stage_table(run)[-1].end_step
        self.last = f"{last:08d}"
        save_checkpoint(folder, last)
        python = self.venv / "bin/python"
        python.parent.mkdir(parents=True)
        python.write_text(
            PYTHON.format(root=ROOT, python=sys.executable, log=self.log, dir=self.dir, last=self.last)
        )
        python.chmod(0o755)
        self.environment = os.environ | {"K3TRAIN_VENV": str(self.venv)}
        stamp = subprocess.run(
            ["bash", "-c", f"source '{ROOT}/launch/env.sh'; stamp"],
            env=self.environment,
            text=True,
            capture_output=True,
            check=True,
        )
        (self.venv / "k3train.stamp").write_text(stamp.stdout)

    def __call__(self, *more: str, **variables: str) -> tuple[int, str, list[str]]:
        """Run it from another folder: exit code, output, and the calls of k3train."""
        self.log.write_text("")
        result = subprocess.run(
            [str(ROOT / "launch/quickstart.sh"), f"dir='{self.dir}'", *more],
            env=self.environment | variables,
            cwd=self.venv,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=200,
        )
        return result.returncode, result.stdout, self.log.read_text().splitlines()


@pytest.fixture
def quickstart(tmp_path: Path) -> Quickstart:
    return Quickstart(tmp_path)


def test_a_new_run_builds_trains_summarises_and_samples_and_a_finished_one_is_not_trained_again(
    quickstart: Quickstart,
) -> None:
    code, output, calls = quickstart()
    assert code == 0, output
    assert calls == [
        "data build tiny",
        f"train experiment=debug dir='{quickstart.dir}'",
        f"sample {quickstart.dir} --prompt The  --tokens 60",
    ]
    assert "debug: finished" in output
    assert f"checkpoint  {quickstart.dir}/checkpoints/step_{quickstart.last}" in output

    code, output, calls = quickstart()
    assert code == 0, output
    assert [call.split()[0] for call in calls] == ["sample"]
    assert "is finished" in output


def test_an_interrupted_run_goes_on(quickstart: Quickstart) -> None:
    save_checkpoint(quickstart.dir, 3)
    shutil.copy(quickstart.dir.parent / "run.yaml", quickstart.dir)
    code, output, calls = quickstart()
    assert code == 0, output
    assert f"going on with the run in {quickstart.dir}" in output
    assert [call.split()[0] for call in calls] == ["data", "train", "sample"]


@pytest.mark.parametrize(
    ("variables", "code", "sentence"),
    [
        ({"DATA_CODE": "2"}, 1, "k3train: the tiny corpus could not be built"),
        ({"TRAIN_CODE": "2"}, 1, "k3train: these settings or data cannot be trained"),
        ({"TRAIN_CODE": "1"}, 1, "k3train: training ended with code 1"),
        ({"TRAIN_CODE": "75"}, 75, "k3train: stopped and saved; the same command goes on from there."),
    ],
)
def test_each_failure_ends_with_one_sentence(
    quickstart: Quickstart, variables: dict[str, str], code: int, sentence: str
) -> None:
    found, output, _ = quickstart(**variables)
    assert found == code
    assert output.splitlines()[-1].startswith(sentence)


def test_a_wrong_setting_is_refused_before_anything_is_built(quickstart: Quickstart) -> None:
    code, output, calls = quickstart("optim.learning_rat=1")
    assert code == 1
    assert "Did you mean optim.learning_rate" in output
    assert calls == []
