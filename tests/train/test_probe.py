"""What is wrong with the machines is found before anything is built, and said with numbers."""

from __future__ import annotations

import logging
import os
import resource
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from k3train.backend import start
from k3train.config.problems import Unavailable
from k3train.config.schema import Cluster, Device, Offload, Optim, Run
from k3train.train import probe
from tests.ranks import run_ranks

CPU = torch.device("cpu")
Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "one"}, "RANK = 'one' is no number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK = 2 is not below WORLD_SIZE = 2"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE = 2, but RANK, MASTER_ADDR, MASTER_PORT is not set"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"},
            "MASTER_PORT is not set: start the ranks with",
        ),
    ],
)
def test_launcher_s_variables_must_fit(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: str
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    probe.check_launcher()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Unavailable, match=words):
        probe.check_launcher()


def test_a_rank_without_a_gpu_of_its_own_is_told_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(Unavailable, match=r"has 2 GPUs, and its rank 2 .* set cluster\.ranks_per_node=2"):
        start.start_backend(Device.cuda)


def _each_rank_has_its_folder(rank: int, folders: list[str]) -> list[str]:
    """Ranks as if on machines of their own: a shared folder, unshared ones, and one that cannot be made."""
    os.environ["LOCAL_RANK"] = "0"
    told = []
    for folder in (folders[0], folders[1 + rank], folders[3] if rank else folders[0]):
        try:
            probe.check_folder(Run(dir=folder))
            told.append("")
        except Unavailable as error:
            told.append(str(error))
    return told


def test_a_folder_that_a_machine_does_not_share_or_cannot_write_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folders = [str(tmp_path / name) for name in ("shared", "one", "two", "file/run")]
    told = run_ranks(2, _each_rank_has_its_folder, folders)
    assert told[0] == told[1]
    shared, unshared, unwritable = told[0]
    assert shared == ""
    assert unshared.startswith("rank 1 on ")
    assert f"does not see what rank 0 writes to {folders[2]}: give dir a folder that all nodes" in unshared
    assert f"cannot write to {folders[3]} (Not a directory)" in unwritable
    assert list((tmp_path / "shared").iterdir()) == [], "nothing is left behind"


def _warn(rank: int, folder: str) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    probe.logger.addHandler(handler)
    run = Run(dir=folder)
    probe.warn_of_shortages(run, CPU)
    clean = len(said)
    now = probe.time.time()
    probe.time.time = lambda: now + 100 * rank  # type: ignore[assignment]
    shutil.disk_usage = lambda path: Usage(2**40, 0, 2**20)  # type: ignore[assignment]
    resource.getrlimit = lambda what: (256, 4096)  # type: ignore[assignment]
    probe._file_system = lambda path: "tmpfs"
    probe.warn_of_shortages(run, CPU)
    return said[clean:]


def test_shortages_are_said_once_with_numbers(tmp_path: Path) -> None:
    first, second = run_ranks(2, _warn, str(tmp_path))
    assert second == []
    disk, memory, files, clocks = first
    assert "has 0.0 GiB free, and two checkpoints need about" in disk
    assert "lies in memory" in memory
    assert "may open 256 files only" in files
    assert "the clocks of rank 0 and rank 1 are 100 s apart" in clocks


def test_gpus_that_differ_and_small_shared_memory_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (text,) = probe._differences([(0.0, "H200"), (1.0, "H100"), (2.0, "H200")])
    assert text.startswith("ranks compute on H100, H200: every step waits for the slowest")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**26, 0, 2**60))
    texts = list(probe._shortages(Run(dir=str(tmp_path)), torch.device("cuda")))
    assert "/dev/shm has 64 MiB; start a container with --ipc=host or --shm-size=8g" in texts


def test_the_file_system_of_a_folder() -> None:
    assert probe._file_system(Path("/proc/self")) == "proc"
    assert probe._file_system(Path("/dev/shm/run")) == "tmpfs"


def test_a_checkpoint_s_size_follows_the_parameters() -> None:
    small, large = Run(), Run()
    large.model.num_layers *= 4
    assert probe.checkpoint_bytes(large) > 2 * probe.checkpoint_bytes(small) > 0


@pytest.mark.parametrize(("threads", "ranks", "share"), [(1, 1, 16), (2, 4, 4), (3, 4, 0), (16, 1, 0)])
def test_adamw_on_the_host_says_when_it_has_few_threads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, threads: int, ranks: int, share: int
) -> None:
    monkeypatch.setattr(probe, "_cores", lambda: 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    run = Run(dir=str(tmp_path), cluster=Cluster(ranks_per_node=ranks), optim=Optim(offload=Offload.cpu))
    told = [text for text in probe._shortages(run, CPU) if "AdamW" in text]
    if not share:
        assert told == []
        return
    (text,) = told
    assert f"updates with {threads} of the {share} cores" in text
    assert text.endswith(f"set cluster.threads_per_rank={share}")
    assert not any("AdamW" in each for each in probe._shortages(replace(run, optim=Optim()), CPU))
