"""Work in a process of its own that ends with all it has started as soon as the user interrupts it.

A run that is drilled may hang, write slowly or be about to start again, and a terminal sends Ctrl-C to all
processes, in any state. So the work has a session of its own, hears nothing, and is killed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.util
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from types import FrameType

import psutil

from k3train.config.problems import BadInput

ASKING = (signal.SIGINT, signal.SIGTERM)
EXPLAINED = (BadInput, OSError)
"""Errors that the command line explains in a sentence; they are raised here again."""


def run_apart(work: Callable[[], int]) -> int:
    """What ``work`` returns, in a fork of this process; 1 when it dies before it returns anything.

    Raises KeyboardInterrupt after SIGINT or SIGTERM, when everything that the work has started is gone.
    Raises BadInput and OSError as the work does.
    """
    multiprocessing.util.get_temp_dir()  # removed at this process' end; the work might not come to its own
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(sender, work))
    with _interruptible():
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)  # until the fork has a session of its own
            process.start()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)
            sender.close()
            answer = _received(receiver)
            process.join()
        except KeyboardInterrupt:
            if process.pid is not None:
                end_family(psutil.Process(process.pid))
                process.join()
            raise
    if isinstance(answer, EXPLAINED):
        raise answer
    return answer


def end_family(process: psutil.Process) -> None:
    """Kill a process and all that descend from it, and wait until they are gone, at most ten seconds."""
    family: list[psutil.Process] = []
    new = [process]
    while new:  # stopped first, so that none can start another
        for each in new:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.suspend()
        family += new
        new = [each for each in _descendants(process) if each not in family]
    for each in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    until = time.monotonic() + 10
    while any(_lives(each) for each in family) and time.monotonic() < until:
        time.sleep(0.01)


def _received(receiver: Connection) -> int | BadInput | OSError:
    try:
        return receiver.recv()
    except EOFError:
        return 1


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _work(sender: Connection, work: Callable[[], int]) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        answer: object = work()
    except EXPLAINED as error:
        answer = error
    sender.send(answer)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    for each in _descendants(psutil.Process()):
        end_family(each)
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Within it the first SIGINT or SIGTERM raises KeyboardInterrupt, and no other disturbs what follows."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in ASKING:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in ASKING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
