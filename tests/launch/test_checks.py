"""What `k3train check` refuses, every launcher refuses before it prints or starts anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import slurm
import sweep

from k3train.__main__ import main

COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "check": lambda overrides: main(["check", *overrides]),
    "train": lambda overrides: main(["train", *overrides]),
    "slurm": slurm.main,
    "sweep": lambda overrides: sweep.main([*overrides, "seed=1,2", "--slurm"]),
}
FAULTS = {
    "optim.muon.adamw": (
        ["experiment=debug", "optim.optimizer=muon", "optim.muon.adamw=[nonsense]"],
        "nonsense",
    ),
    "checkpoint.load_from": (["experiment=debug", "checkpoint.load_from=nowhere"], "cannot be loaded"),
    "memory": (["experiment=debug", "cluster.device_memory_gib=0.001"], "GiB"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_that_check_refuses_is_refused_everywhere(
    command: str,
    fault: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides, said = FAULTS[fault]
    assert COMMANDS[command](overrides) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert "#SBATCH" not in printed.out
    assert not list(tmp_path.iterdir())
