"""The program that every rank runs, as far as it goes without other ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from k3train.config.compose import save_resolved
from k3train.train.__main__ import describe, main
from k3train.train.claim import STOP_FILE
from k3train.train.signals import StopRequest
from tests.train.runs import make_run


def test_other_number_of_ranks_than_the_run_has_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_resolved(make_run(tmp_path, ranks=2), tmp_path / "run.yaml")
    assert main([str(tmp_path / "run.yaml")]) == 2
    assert "makes 2 ranks, but 1 were started" in capsys.readouterr().err


def test_ranks_stop_when_the_agent_that_started_them_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")
    stop = StopRequest(tmp_path)
    try:
        assert not stop.poll()
        other = os.getppid() + 1
        monkeypatch.setattr(os, "getppid", lambda: other)
        assert stop.poll()
        assert not (tmp_path / STOP_FILE).exists()
    finally:
        stop.restore()


def test_rank_that_was_started_by_hand_outlives_its_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    stop = StopRequest(tmp_path)
    try:
        other = os.getppid() + 1
        monkeypatch.setattr(os, "getppid", lambda: other)
        assert not stop.poll()
    finally:
        stop.restore()


def test_a_stop_file_is_obeyed_when_it_is_ours(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stop = StopRequest(tmp_path)
    try:
        assert not stop.poll()
        (tmp_path / STOP_FILE).touch()
        if os.geteuid() == 0:  # only root can give files away
            os.chown(tmp_path / STOP_FILE, 65534, -1)
            assert not stop.poll()
            assert not stop.poll()
            assert caplog.text.count("is another user's file and is not obeyed") == 1
            os.chown(tmp_path / STOP_FILE, 0, -1)
        assert stop.poll()
        assert stop.reason == f"{tmp_path / STOP_FILE} exists"
    finally:
        stop.restore()


@pytest.mark.parametrize(
    ("noted", "reason"),
    [("SIGINT", "SIGINT"), ("SIGTERM\n", "SIGTERM"), ("other", "{} exists"), ("", "{} exists")],
)
def test_a_stop_file_tells_the_signal_that_made_it(tmp_path: Path, noted: str, reason: str) -> None:
    stop = StopRequest(tmp_path)
    try:
        (tmp_path / STOP_FILE).write_text(noted)
        assert stop.poll()
        assert stop.reason == reason.format(tmp_path / STOP_FILE)
    finally:
        stop.restore()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 56.00 MiB."), "no memory left"),
        (dist.DistBackendError("NCCL error: Failed to CUDA calloc async 24 bytes"), "no memory left"),
        (torch.AcceleratorError("CUDA error: out of memory"), "no memory left"),
        (dist.DistBackendError("NCCL communicator was aborted"), "connection to another rank is lost"),
        (ValueError("whatever"), "Traceback"),
    ],
)
def test_what_ended_a_rank_is_named(error: Exception, said: str) -> None:
    try:
        raise error
    except Exception as caught:
        message = describe(caught)
    assert said in message
    assert str(error) in message
