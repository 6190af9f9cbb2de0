"""The Slurm job: its rendered text, and the script itself run under a small Slurm made of shell programs.

Only Slurm's commands and the training program are stand-ins; the script, its signals, and node.py with
torch's elastic agent are real.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import slurm

from k3train.config.build import to_plain
from k3train.config.compose import load_resolved
from k3train.config.problems import ConfigError
from k3train.config.schema import Cluster, Device, Run
from k3train.train.claim import LOCK, claimed
from tests.launch.stand_ins import PATIENCE, SBATCH, SCONTROL, SRUN
from tests.saved import save_checkpoint


def run_of(**cluster: object) -> Run:
    return Run(name="long run", dir="runs/long run", cluster=Cluster(**cluster))  # type: ignore[arg-type]


def render(run: Run, folder: Path, **changes: object) -> str:
    arguments = {"grace_seconds": 300, "extra": [], "python": sys.executable, "folder": folder} | changes
    return slurm.render(run, **arguments)  # type: ignore[arg-type]


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_the_directives_say_what_the_cluster_settings_say() -> None:
    run = run_of(
        nodes=4, ranks_per_node=8, threads_per_rank=2, partition="gpu", account="lab", time_limit_minutes=90
    )
    text = render(run, Path("/home/me/k3 100%"), extra=["--exclusive"])
    assert text.startswith("#!/bin/bash\n#SBATCH ")
    assert directives(text) == [
        '--job-name="long run"',
        "--nodes=4",
        "--ntasks-per-node=1",
        "--cpus-per-task=24",
        "--gpus-per-node=8",
        '--chdir="/home/me/k3 100%"',
        '--output="/home/me/k3 100%%/runs/long run/slurm-%j.out"',
        "--open-mode=append",
        "--requeue",
        "--signal=B:USR1@300",
        "--partition=gpu",
        "--account=lab",
        "--time=90",
        "--exclusive",
    ]
    assert "{{" not in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_a_job_that_may_lose_nodes_outlives_them_and_nodes_know_the_policy() -> None:
    text = render(run_of(nodes=4, min_nodes=3, max_restarts=5, restart_delay_seconds=0.5), Path("/w"))
    assert "--no-kill" in directives(text)
    assert "srun --wait=0 --no-kill bash" in text
    assert "--min-nodes 3 --max-restarts 5 --restart-delay 0.5" in text
    text = render(run_of(nodes=4), Path("/w"))
    assert "--no-kill" not in text
    assert "--min-nodes 4 --max-restarts 3" in text


@pytest.mark.parametrize(
    ("minutes", "seconds", "said"),
    [
        (
            0,
            -4,
            "--grace-seconds = -4 is no time that Slurm can signal before the limit. Use 1 to 65,535 seconds",
        ),
        (0, 0, "Use 1 to 65,535 seconds"),
        (0, 65536, "Use 1 to 65,535 seconds"),
        (2, 600, "leaves no time to train before cluster.time_limit_minutes = 2. Use less than 120 seconds"),
        (10, 600, "or a longer limit"),
    ],
)
def test_a_grace_that_cannot_be(
    minutes: int, seconds: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"cluster.time_limit_minutes={minutes}", "--grace-seconds", str(seconds)]
    assert slurm.main(words) == 2
    assert said in capsys.readouterr().err
    assert "--signal=B:USR1@599" in render(run_of(time_limit_minutes=10), Path("/w"), grace_seconds=599)


def test_a_cpu_run_asks_for_no_gpu_and_unset_settings_for_nothing() -> None:
    run = run_of()
    run.device = Device.cpu
    options = " ".join(directives(render(run, Path("/w"))))
    for absent in ("--gpus", "--partition", "--account", "--time"):
        assert absent not in options


def test_what_an_undecided_device_asks_of_slurm_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert slurm.main(["experiment=debug"]) == 0
    said = capsys.readouterr()
    assert "#SBATCH --gpus-per-node=" in said.out
    assert said.err.startswith("device = auto: what the nodes have is not known here, so the job asks for ")
    for device, asks in (("cpu", False), ("cuda", True)):
        assert slurm.main(["experiment=debug", f"device={device}"]) == 0
        said = capsys.readouterr()
        assert (said.err, "--gpus-per-node" in said.out) == ("", asks)


@pytest.mark.parametrize("bad", ["a\n#SBATCH --uid=0", 'a" --uid=0', "$(id)", "a;b"])
def test_names_that_would_change_the_script_are_refused(bad: str) -> None:
    run = run_of(partition=bad)
    run.name = bad
    with pytest.raises(ConfigError) as error:
        render(run, Path("/w"))
    assert [problem.key for problem in error.value.problems] == ["name", "cluster.partition"]


def test_an_option_that_holds_a_password_is_refused_without_repeating_it() -> None:
    with pytest.raises(ConfigError, match=r"slurm\.secret") as error:
        render(run_of(), Path("/work"), extra=["--export=ALL,DB_PASSWORD=hunter2"])
    assert "hunter2" not in str(error.value)


# ------------------------------------------------------------------------------- a Slurm for one machine

ROOT = Path(__file__).parents[2]

# Trains until the stop file is there, and saves a checkpoint on the way out, as ranks do.
TRAINING = """
import os, pathlib, sys, time
run_dir = pathlib.Path(sys.argv[-1]).parent
rank, size, life = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"))
with open(run_dir / "lives", "a") as file:
    file.write(f"{life} rank {rank}/{size} threads {os.environ['OMP_NUM_THREADS']}\\n")
what = (run_dir / "what").read_text()
if what == "finish":
    sys.exit(0)
if what == "fail":
    sys.exit(2) if rank == "1" else time.sleep(60)
while not (run_dir / "STOP").exists():
    time.sleep(0.02)
if what == "save":
    (run_dir / "checkpoints" / f"step_{time.monotonic_ns():024d}").mkdir(parents=True)
sys.exit(75)
"""


class FakeSlurm:
    """One machine that plays a Slurm cluster."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.nodes = nodes
        self.jobs: list[subprocess.Popen[str]] = []
        self.folder = folder / "work place"
        self.run_dir = self.folder / "runs/long run"
        self.bin = folder / "bin"
        self.log = folder / "slurm.log"
        self.run_dir.mkdir(parents=True)
        self.bin.mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("sbatch", SBATCH)):
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)
        package = self.folder / "k3train"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "train.py").write_text(TRAINING)
        (self.run_dir / "run.yaml").write_text("name: long run\n")
        run = run_of(nodes=nodes, ranks_per_node=1, threads_per_rank=3)
        run.device = Device.cpu
        self.script = self.folder / "job.sbatch"
        self.script.write_text(render(run, self.folder))

    def start(self, what: str, **variables: str) -> subprocess.Popen[str]:
        """Start the job script as slurmd does; ``what`` the training does is one of TRAINING's words."""
        (self.run_dir / "what").write_text(what)
        environment = os.environ | {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),  # for node.py; ranks find the stand-in first, in their own folder
            "SLURM_LOG": str(self.log),
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_JOB_NUM_NODES": str(self.nodes),
            **variables,
        }
        job = subprocess.Popen(
            ["bash", str(self.script)],
            cwd=self.folder,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.jobs.append(job)
        return job

    def close(self) -> None:
        """End what a failed test left running."""
        (self.run_dir / "STOP").touch()
        for job in self.jobs:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()

    def lives(self) -> list[str]:
        """What each rank that started has written, sorted."""
        file = self.run_dir / "lives"
        return sorted(file.read_text().splitlines()) if file.exists() else []

    def asked(self) -> str:
        """What Slurm was asked to do."""
        return self.log.read_text() if self.log.exists() else ""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FakeSlurm]:
    slurm = FakeSlurm(tmp_path, nodes=1)
    yield slurm
    slurm.close()


@pytest.fixture
def two_nodes(tmp_path: Path) -> Iterator[FakeSlurm]:
    slurm = FakeSlurm(tmp_path, nodes=2)
    yield slurm
    slurm.close()


def wait_for_ranks(cluster: FakeSlurm, job: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while len(cluster.lives()) < cluster.nodes:
        assert time.monotonic() < deadline, "the ranks did not start"
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.05)


def end(job: subprocess.Popen[str]) -> str:
    return job.communicate(timeout=PATIENCE)[0]


@pytest.mark.timeout(3 * PATIENCE)
def test_the_time_limit_stops_saves_and_requeues_and_the_next_start_finishes(two_nodes: FakeSlurm) -> None:
    job = two_nodes.start("save")
    wait_for_ranks(two_nodes, job)
    job.send_signal(signal.SIGUSR1)
    output = end(job)
    assert job.returncode == 0, output
    assert two_nodes.asked() == f"scontrol requeue {os.getpid()}\n"
    first = f"{os.getpid()}-0"
    assert two_nodes.lives() == [f"{first} rank {rank}/2 threads 3" for rank in (0, 1)]

    assert (two_nodes.run_dir / "STOP").exists()
    job = two_nodes.start("finish", SLURM_RESTART_COUNT="1", SLURM_JOB_NUM_NODES="1")
    output = end(job)
    assert job.returncode == 0, output
    assert not (two_nodes.run_dir / "STOP").exists()
    assert "ended with code 0, checkpoint step_" in output
    assert two_nodes.lives()[-1] == f"{os.getpid()}-1 rank 0/1 threads 3"
    assert two_nodes.asked().count("requeue") == 1


@pytest.mark.timeout(3 * PATIENCE)
def test_a_stop_that_saved_nothing_is_not_requeued(cluster: FakeSlurm) -> None:
    job = cluster.start("stop")
    wait_for_ranks(cluster, job)
    job.send_signal(signal.SIGUSR1)
    output = end(job)
    assert job.returncode == 1
    assert "this start saved no checkpoint" in output
    assert cluster.asked() == ""


@pytest.mark.timeout(3 * PATIENCE)
def test_sigterm_to_the_script_saves_and_ends(cluster: FakeSlurm) -> None:
    job = cluster.start("save")
    wait_for_ranks(cluster, job)
    job.send_signal(signal.SIGTERM)
    output = end(job)
    assert job.returncode == 0, output
    assert len(list((cluster.run_dir / "checkpoints").iterdir())) == 1
    assert cluster.asked() == ""


@pytest.mark.timeout(3 * PATIENCE)
def test_a_failed_rank_ends_the_job_and_is_not_requeued(two_nodes: FakeSlurm) -> None:
    job = two_nodes.start("fail")
    output = end(job)
    assert job.returncode == 2, output
    assert two_nodes.asked() == ""


def test_a_job_without_its_resolved_run_says_so(cluster: FakeSlurm) -> None:
    (cluster.run_dir / "run.yaml").unlink()
    job = cluster.start("finish")
    assert "run.yaml is missing: submit with" in end(job)
    assert job.returncode == 2
    assert cluster.lives() == []


def test_submitting_writes_what_the_job_reads_and_refuses_to_mix_two_runs(
    cluster: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(cluster.folder)
    monkeypatch.setenv("PATH", f"{cluster.bin}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_LOG", str(cluster.log))
    assert slurm.main(["experiment=debug", "name=one", "--submit"]) == 0
    folder = cluster.folder / "runs/one"
    assert load_resolved(folder / "run.yaml").name == "one"
    assert '--job-name="one"' in (folder / "job.sbatch").read_text()
    assert cluster.asked() == f"sbatch {folder}/job.sbatch\n"

    assert slurm.main(["experiment=debug", "name=one", "monitor.console_every_steps=3", "--submit"]) == 0
    assert "monitor.console_every_steps: 10 -> 3" in capsys.readouterr().out
    save_checkpoint(folder, 1, {"settings": to_plain(load_resolved(folder / "run.yaml"))})
    assert slurm.main(["experiment=debug", "name=one", "seed=99", "--submit"]) == 2
    assert "seed = 99 was 1234" in capsys.readouterr().err
    assert cluster.asked().count("sbatch") == 4


@pytest.fixture
def submit(cluster: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Submit a run from the cluster's folder."""
    monkeypatch.chdir(cluster.folder)
    monkeypatch.setenv("PATH", f"{cluster.bin}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_LOG", str(cluster.log))
    return lambda *words: slurm.main(["experiment=debug", "device=cpu", *words, "--submit"])


def test_a_run_that_is_in_use_is_not_submitted_and_stays_as_it_is(
    cluster: FakeSlurm, submit: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit("name=one") == 0
    folder = Path("runs/one")
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != LOCK}
    cluster.log.write_text("")
    with claimed(Run(dir=str(folder))):
        assert submit("name=one", "optim.weight_decay=0.3") == 2
    assert f"dir = {folder} is in use by process {os.getpid()} on" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != LOCK} == before
    assert cluster.asked() == ""


def test_without_sbatch_nothing_is_written(
    cluster: FakeSlurm, submit: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    (cluster.bin / "sbatch").unlink()
    assert submit("name=one") == 3
    assert "sbatch is not on this machine: submit where Slurm is" in capsys.readouterr().err
    assert not Path("runs/one").exists()


def test_a_folder_that_cannot_be_made_is_named(
    submit: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for folder in ("file", "file/x"):
        assert submit(f"dir={tmp_path / folder}") == 3
        assert f"dir = {tmp_path / folder} cannot hold the run: " in capsys.readouterr().err


def test_printing_writes_nothing(
    cluster: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(cluster.folder)
    assert slurm.main(["experiment=debug", "name=one", "--sbatch=--exclusive"]) == 0
    assert "#SBATCH --exclusive\n" in capsys.readouterr().out
    assert not (cluster.folder / "runs/one").exists()
    assert slurm.main(["experiment=debug", "nam=one"]) == 2
    assert "Did you mean name" in capsys.readouterr().err
