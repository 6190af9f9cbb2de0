"""Saving beside training, on real ranks: the same bytes, one commit for all, and writers that stop or die."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from k3train.checkpoint.folder import LATEST, clear_leftovers, newest_good, step_name, verify
from k3train.checkpoint.listing import committed
from k3train.checkpoint.manifest import CheckpointNotWritten, read_manifest
from k3train.checkpoint.save import PendingSave, Save, begin_save, save_checkpoint
from k3train.config.schema import Parallel, Precision
from tests.parallel.toy import build_toy, train_toy
from tests.patience import PATIENCE
from tests.ranks import RanksFailed, run_ranks

Toy = tuple[Any, Any, Any]


def save(how: Callable[..., Any], toy: Toy, folder: Path, step: int) -> Any:
    chunks, optimizer, groups = toy
    state = {"step": step, "tokens": 100 * step}
    return how(
        Save(directory=folder, chunks=chunks, optimizer=optimizer, train_state=state, groups=groups, keep=2)
    )


def train(toy: Toy, step: int) -> None:
    chunks, optimizer, groups = toy
    train_toy(chunks, optimizer, groups, steps=1, start=step)


def reason(work: Callable[[], Any]) -> str:
    try:
        work()
    except CheckpointNotWritten as error:
        return str(error)
    return "no error"


def begin_and_halt(toy: Toy, folder: Path, step: int) -> PendingSave:
    """A pending save whose writer on rank 1 stands still."""
    pending = save(begin_save, toy, folder, step)
    if torch.distributed.get_rank() == 1:
        os.kill(pending.writer_pid, signal.SIGSTOP)
    torch.distributed.barrier()
    return pending


def overlapped(rank: int, plain: Path, beside: Path) -> Any:
    toy = build_toy(2, Parallel(ep=2), Precision.bf16)
    train(toy, 1)
    for folder in (plain, beside):
        save(save_checkpoint, toy, folder, 1)
    train(toy, 2)
    save(save_checkpoint, toy, plain, 2)
    pending = begin_and_halt(toy, beside, 2)
    seen = []
    for step in (3, 4, 5):
        train(toy, step)
        seen.append((pending.poll(), (beside / LATEST).read_text(), len(committed(beside))))
    if rank == 1:
        os.kill(pending.writer_pid or 0, signal.SIGCONT)
    return seen, pending.wait(), pending.poll(), Path(f"/proc/self/task/{os.getpid()}/children").read_text()


def test_training_goes_on_while_writers_write_the_same_bytes(tmp_path: Path) -> None:
    plain, beside = tmp_path / "plain", tmp_path / "beside"
    for seen, path, again, children in run_ranks(2, overlapped, plain, beside):
        assert seen == [(None, step_name(1), 1)] * 3
        assert path == again == beside / step_name(2)
        assert children == ""
    assert (beside / LATEST).read_text() == step_name(2)
    verify(beside / step_name(2))
    assert read_manifest(beside / step_name(2)) == read_manifest(plain / step_name(2))
    assert {oct(each.stat().st_mode & 0o077) for each in beside.rglob("*")} == {"0o0"}


def with_faults(rank: int, folder: Path) -> Any:
    toy = build_toy(2, Parallel(), Precision.fp32)
    save(save_checkpoint, toy, folder, 1)
    train(toy, 2)
    pending = begin_and_halt(toy, folder, 2)
    running = pending.poll()
    if rank == 1:
        os.kill(pending.writer_pid or 0, signal.SIGKILL)
        os.waitid(os.P_PID, pending.writer_pid or 0, os.WEXITED | os.WNOWAIT)
    torch.distributed.barrier()
    died = reason(pending.poll)
    names = [sorted(path.name for path in folder.iterdir())]
    torch.distributed.barrier()

    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    full = reason(lambda: save(begin_save, toy, folder, 2).wait())
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    names.append(sorted(path.name for path in folder.iterdir()))
    torch.distributed.barrier()
    return running, died, full, names, save(begin_save, toy, folder, 2).wait()


def test_a_writer_that_dies_or_finds_no_room_is_heard_of_by_all_ranks_at_once(tmp_path: Path) -> None:
    for running, died, full, names, path in run_ranks(2, with_faults, tmp_path):
        assert running is None
        assert (
            "step_00000002 was not written: the process that writes for this rank ended with SIGKILL" in died
        )
        assert "rank 1; 1 of 2 ranks failed" in died
        assert re.search(rf"/__0_0.distcp: File too large \(rank 0.*\d+ bytes, .* free in {tmp_path};", full)
        assert names == [["LATEST", step_name(1)]] * 2
        assert path == tmp_path / step_name(2)
    assert newest_good(tmp_path) == tmp_path / step_name(2)


def die_while_writing(rank: int, folder: Path) -> None:
    toy = build_toy(2, Parallel(), Precision.fp32)
    save(save_checkpoint, toy, folder, 1)
    pending = begin_and_halt(toy, folder, 2)
    if rank == 1:
        (folder.parent / "pid").write_text(str(pending.writer_pid))
        os.kill(os.getpid(), signal.SIGKILL)
    pending.wait()


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def test_a_writer_ends_with_its_rank_and_the_older_checkpoint_stays(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(RanksFailed, match="rank 1 ended with -9"):
        run_ranks(2, die_while_writing, folder)
    assert any(".tmp-" in path.name for path in folder.iterdir())
    writer, until = int((tmp_path / "pid").read_text()), time.monotonic() + PATIENCE
    while lives(writer):  # halted, so it would never end by itself; a kill takes effect when it is scheduled
        assert time.monotonic() < until
        time.sleep(0.05)
    assert newest_good(folder) == folder / step_name(1)
    clear_leftovers(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["LATEST", step_name(1)]
