"""Streams are joined in every case, shown with streams that only write down who waits for whom."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from k3train.kernels import beside

CUDA = torch.device("cuda", 0)


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []
    here, other = Stream("here", log), Stream("other", log)

    @contextmanager
    def current(stream: Stream) -> Any:
        log.append(f"on {stream.name}")
        yield
        log.append(f"off {stream.name}")

    monkeypatch.setattr(beside, "_stream", lambda device: other)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: here)
    monkeypatch.setattr(torch.cuda, "stream", current)
    return log


BOTH = ["other waits for here", "on other", "launch", "off other", "body", "here waits for other"]


@pytest.mark.parametrize("device", [CUDA, torch.device("cpu")])
@pytest.mark.parametrize("on", [True, False])
def test_body_runs_beside_the_launch(log: list[str], device: torch.device, on: bool) -> None:
    with beside.launched_beside(lambda: log.append("launch"), device, on=on):
        log.append("body")
    assert log == (BOTH if on and device == CUDA else ["launch", "body"])


def test_a_body_that_raises_is_joined(log: list[str]) -> None:
    def body() -> None:
        with beside.launched_beside(lambda: log.append("launch"), CUDA, on=True):
            log.append("body")
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        body()
    assert log == BOTH


def test_a_launch_that_raises_is_joined(log: list[str]) -> None:
    def launch() -> None:
        raise RuntimeError("no room")

    with pytest.raises(RuntimeError, match="no room"), beside.launched_beside(launch, CUDA, on=True):
        log.append("body")
    assert (log[0], log[-1]) == (BOTH[0], BOTH[-1])
    assert "body" not in log
