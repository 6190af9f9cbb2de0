"""A real run as a Slurm job: the rendered script, signalled, saves and requeues, and goes on bit for bit.

Slurm's commands are stand-ins; the script, node.py, torch's elastic agent and the training are real.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import slurm

from k3train.config.schema import Curriculum, Run, Stage, StageParallel
from tests.history import read_history
from tests.launch.stand_ins import PATIENCE, SBATCH, SCONTROL, SRUN
from tests.train.runs import losses, make_run, records, train_run

ROOT = Path(__file__).parents[2]


def _run(folder: Path, name: str) -> Run:
    stages = {
        "short": Stage(context_tokens=128, tokens=40 * 512, batch_tokens=512),
        "long": Stage(context_tokens=256, tokens=3 * 512, batch_tokens=512, parallel=StageParallel(cp=2)),
    }
    return make_run(
        folder,
        ranks=2,
        name=name,
        dir=str(folder / name),
        curriculum=Curriculum(stages=stages, order=list(stages), eval_tokens=256),
    )


def _start(job: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start the job script as slurmd does."""
    return subprocess.Popen(
        ["bash", str(job)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


@pytest.mark.timeout(4 * PATIENCE)
def test_signal_save_requeue_and_the_same_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = _run(tmp_path, "golden")
    assert train_run(golden) == [0, 0]

    programs, log = tmp_path / "bin", tmp_path / "slurm.log"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("sbatch", SBATCH)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SLURM_LOG": str(log),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": "1",
    }
    for name in ("PATH", "SLURM_LOG"):
        monkeypatch.setenv(name, environment[name])
    run = _run(tmp_path, "job")
    script = slurm.render(run, grace_seconds=60, extra=[], python=sys.executable, folder=tmp_path)
    assert slurm.submit(run, script) == 0
    job = tmp_path / "job" / "job.sbatch"
    assert log.read_text() == f"sbatch {job}\n"

    first = _start(job, environment)
    try:
        deadline = time.monotonic() + PATIENCE
        while not (tmp_path / "job" / "metrics.jsonl").exists() or len(losses(run)) < 3:
            assert first.poll() is None, first.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        first.send_signal(signal.SIGUSR1)  # to the script alone, as --signal=B:USR1@60 does
        output = first.communicate(timeout=PATIENCE)[0]
        assert first.returncode == 0, output
        assert log.read_text().endswith(f"scontrol requeue {os.getpid()}\n"), output
        stopped = max(losses(run))
        assert 3 <= stopped < 43
        second = _start(job, environment | {"SLURM_RESTART_COUNT": "1"})
        output = second.communicate(timeout=PATIENCE)[0]
        assert second.returncode == 0, output
    finally:
        if first.poll() is None:
            os.killpg(first.pid, signal.SIGKILL)
    assert losses(run) == losses(golden)
    steps = records(run, "step")
    assert [r["step"] for r in steps] == list(range(1, 44)), "no step was lost or trained twice"
    assert all(r["step_seconds"] >= r["data_wait_seconds"] >= 0 for r in steps)
    starts = [entry for entry in read_history(tmp_path / "job") if entry["event"] == "start"]
    assert [(s["step"], s.get("SLURM_RESTART_COUNT")) for s in starts] == [(0, None), (stopped, "1")]
    assert len({s["run_id"] for s in starts}) == 1
