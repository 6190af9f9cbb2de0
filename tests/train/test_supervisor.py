"""The supervisor with real processes: what it starts again, how often, and what it leaves alone."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.launcher.api import LaunchConfig

from k3train.config.compose import save_resolved
from k3train.faults import PLAN_VARIABLE
from k3train.train.failure import forget_failures, note_failure, read_failures
from k3train.train.health import unhealthy
from k3train.train.launch import launch
from k3train.train.signals import EXIT_BAD_INPUT
from k3train.train.supervisor import EVENTS, NO_LOGS, Policy, describe, exit_code, supervise
from tests.ranks import run_ranks
from tests.train.runs import make_run, records

PROGRAM = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
rank, start = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with open(folder / "lives", "a") as file:
    file.write(f"{start} {rank}\\n")
what = (folder / "what").read_text().split()
what = what[min(start, len(what) - 1)]
if what == "deaf":  # as a rank that waits in a collective for the dead one
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / "deaf").touch()
    while rank == "1":
        time.sleep(60)
    while not (folder / "deaf").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
if what == "kill" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if what in ("save", "back") and rank == "0":  # back: as a run that has gone back
    step = start + 1 if what == "save" else 99 - start
    (folder / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
    os.kill(os.getpid(), signal.SIGKILL)
if what.startswith("raise") and rank == "1":
    from k3train.train.failure import note_failure
    try:
        raise TypeError("out of order")
    except TypeError as error:
        error.add_note("after step " + what.removeprefix("raise"))
        note_failure(folder, 1, error)
        sys.exit(1)
sys.exit(int(what) if what.isdigit() and rank == "1" else 0)
"""


def _supervise(_: int, folder: Path, what: str, restarts: int) -> tuple[int, list[dict[str, Any]], float]:
    folder.mkdir()
    (folder / "what").write_text(what)
    (folder / "program.py").write_text(PROGRAM)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="test",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        logs_specs=NO_LOGS,
    )
    policy = Policy(run_dir=folder, stop_file=folder / "STOP", max_restarts=restarts, delay_seconds=0.2)
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    began = time.monotonic()
    code = supervise(config, sys.executable, str(folder / "program.py"), str(folder), policy=policy)
    events = [json.loads(line) for line in (folder / EVENTS).read_text().splitlines()]
    return code, events, time.monotonic() - began


def outcome(folder: Path, what: str, restarts: int = 2) -> tuple[int, int, list[dict[str, Any]]]:
    """Exit code, number of starts, failures, when rank 1 (or 0) ends as ``what`` says, start after start."""
    ((code, events, _),) = run_ranks(1, _supervise, folder, what, restarts)
    starts = [event["start"] for event in events if event["event"] == "started"]
    assert starts == list(range(len(starts)))
    return code, len(starts), [event for event in events if event["event"] == "failed"]


def test_a_killed_rank_is_started_again_with_all_others_after_a_wait_that_doubles(tmp_path: Path) -> None:
    code, starts, failures = outcome(tmp_path / "a", "kill kill 0")
    assert (code, starts) == (0, 3)
    assert [failure["ranks"] for failure in failures] == [{"1": -9}, {"1": -9}]
    lives = (tmp_path / "a" / "lives").read_text().split("\n")
    assert {"0 1", "1 1", "2 0", "2 1"} <= set(lives)


def test_failures_in_a_row_are_limited_and_a_new_checkpoint_ends_a_row(tmp_path: Path) -> None:
    code, starts, failures = outcome(tmp_path / "a", "kill")
    assert (code, starts) == (1, 3)
    assert [failure["restarts"] for failure in failures] == [True, True, False]
    code, starts, failures = outcome(tmp_path / "b", "save save save save 0", restarts=1)
    assert (code, starts) == (0, 5)
    assert [failure["newest_checkpoint"] for failure in failures] == [1, 2, 3, 4]
    code, starts, failures = outcome(tmp_path / "c", "back back back 0", restarts=1)
    assert (code, starts) == (0, 4)
    assert [failure["newest_checkpoint"] for failure in failures] == [99, 98, 97]


def test_bad_input_environment_and_stop_are_never_started_again(tmp_path: Path) -> None:
    for code in (2, 3, 75):
        assert outcome(tmp_path / str(code), str(code))[:2] == (code, 1)
    assert outcome(tmp_path / "other", "1 2", restarts=9)[:2] == (2, 2)


def test_an_error_of_the_program_that_comes_again_is_not_tried_a_third_time(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, starts, failures = outcome(tmp_path / "same", "raise3", restarts=9)
    assert (code, starts) == (1, 2)
    assert [failure["restarts"] for failure in failures] == [True, False]
    said = "rank 1 ended with 1; twice in a row by TypeError in program.py:"
    assert said in (error := capfd.readouterr().err)
    assert "after step 3, which another start would meet again: mend it;" in error
    assert not failures[0]["comes_again"]
    assert failures[1]["comes_again"].startswith("TypeError in program.py:")


def _train_with_an_error(_: int, folder: Path) -> tuple[int, list[dict[str, Any]], list[int]]:
    run = make_run(folder, ranks=2)
    run.checkpoint.every_steps = 2
    resolved, plan = Path(run.dir) / "run.yaml", folder / "plan.json"
    save_resolved(run, resolved)
    error = {"point": "step.forward", "kind": "exception", "rank": 1, "step": 4, "restart": None}
    plan.write_text(json.dumps({"faults": [error], "log": str(folder / "log")}))
    os.environ |= {PLAN_VARIABLE: str(plan), "PYTHONPATH": str(Path(__file__).parents[2])}
    code = launch(run, resolved)
    events = [json.loads(line) for line in (Path(run.dir) / EVENTS).read_text().splitlines()]
    return code, events, [record["step"] for record in records(run, "step")]


def test_real_ranks_that_meet_an_error_in_the_same_step_again_end_the_run(tmp_path: Path) -> None:
    ((code, events, steps),) = run_ranks(1, _train_with_an_error, tmp_path)
    assert code == 1
    assert steps == [1, 2, 3, 3]
    _, last = (event for event in events if event["event"] == "failed")
    assert last["comes_again"].startswith("InjectedFault in faults.py:")
    assert last["comes_again"].endswith(", after step 3")


@pytest.mark.parametrize("what", ["raise3 raise4 0", "raise3 kill raise3 0", "raise3 1 raise3 0"])
def test_another_error_a_step_further_and_a_fault_are_tried_again(tmp_path: Path, what: str) -> None:
    assert outcome(tmp_path / "a", what, restarts=9)[:2] == (0, what.count(" ") + 1)


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (TypeError("unexpected keyword"), False),
        (ImportError("no module"), False),
        (RuntimeError("shape '[2, 3]' is invalid"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("NCCL error: unhandled system error"), True),
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"), True),
        (torch.distributed.DistBackendError("timed out"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
    ],
)
def test_only_errors_of_the_program_are_expected_again(
    tmp_path: Path, error: Exception, passes: bool
) -> None:
    try:
        raise error
    except Exception as caught:
        note_failure(tmp_path, 3, caught)
    found = read_failures(tmp_path, [2, 3])
    assert (not found) == passes
    forget_failures(tmp_path, [3])
    assert read_failures(tmp_path, [3]) == set()


def test_a_survivor_that_waits_for_the_dead_rank_is_killed_after_a_short_grace(tmp_path: Path) -> None:
    code, starts, failures = outcome(tmp_path / "a", "deaf 0")
    assert (code, starts) == (0, 2)
    assert failures[0]["ranks"] == {"0": -9}


def test_a_node_whose_gpu_needs_a_reset_is_not_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """nvidia-resiliency-ext's answer needs a broken GPU, so it is given here."""
    health: Any = ModuleType("nvidia_resiliency_ext.shared_utils.health_check")
    health.GPUHealthCheck = type("GPUHealthCheck", (), {"enabled": True, "__call__": lambda self: False})
    for name in ("nvidia_resiliency_ext", "nvidia_resiliency_ext.shared_utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, health.__name__, health)
    code, starts, failures = outcome(tmp_path / "a", "kill 0")
    assert (code, starts, failures[0]["restarts"]) == (1, 1, False)
    assert (
        "rank 1 was ended by SIGKILL; this node is not used again: a GPU needs a reset"
        in capfd.readouterr().err
    )


def _launch(_: int, folder: Path) -> int:
    temporary = folder / "tmp"
    temporary.mkdir()
    tempfile.tempdir = str(temporary)
    run = make_run(folder, ranks=1)
    Path(run.dir).mkdir(parents=True, exist_ok=True)
    assert launch(run, folder / "missing.yaml") == EXIT_BAD_INPUT
    return len(list(temporary.iterdir()))


def test_a_start_leaves_nothing_among_temporary_files(tmp_path: Path) -> None:
    assert run_ranks(1, _launch, tmp_path) == [0]


def test_nvidia_resiliency_ext_itself_asks_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nvidia_resiliency_ext.shared_utils.health_check")
    assert unhealthy() == "", "without a driver there is nothing to say"

    class NVMLError(Exception):
        pass

    action = 0
    driver: Any = ModuleType("pynvml")
    driver.NVMLError = NVMLError
    driver.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 274
    for number, name in enumerate(("NONE", "GPU_RESET", "NODE_REBOOT", "DRAIN_P2P", "DRAIN_AND_RESET")):
        setattr(driver, f"NVML_GPU_RECOVERY_ACTION_{name}", number)
    driver.nvmlInit = driver.nvmlShutdown = lambda: None
    driver.nvmlSystemGetDriverVersion = lambda: "580.95.05"
    driver.nvmlDeviceGetCount = lambda: 2
    driver.nvmlDeviceGetHandleByIndex = lambda index: index
    driver.nvmlDeviceGetFieldValues = lambda handle, fields: [
        SimpleNamespace(value=SimpleNamespace(uiVal=action if handle == 1 else 0))
    ]
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert unhealthy() == ""
    action = 1
    assert unhealthy() == "a GPU needs a reset (nvidia-resiliency-ext)"


def test_the_code_and_the_words_that_tell_most() -> None:
    assert exit_code([75, 75]) == 75
    assert exit_code([75, 2, -15]) == 2
    assert exit_code([1, 3]) == 3
    assert exit_code([75, -9]) == 1
    assert exit_code([-9]) == 1
    assert describe({0: 1, 1: -9, 2: 1}) == "rank 1 was ended by SIGKILL"
    assert describe({0: 1, 2: 7}) == "rank 0 ended with 1, rank 2 ended with 7"
    assert describe({}) == "a rank failed"
