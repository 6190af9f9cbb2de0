"""Whether the machines can carry a run, found out before anything is built: folder, room, clocks."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from k3train.config.problems import Unavailable
from k3train.config.schema import Offload, Precision, Run
from k3train.kernels import fp8
from k3train.optim.memory import GIB, check_host_memory, check_memory, host_shortage
from k3train.plan.counts import count_parameters

FEW_FILES = 4096
SMALL_SHARED_MEMORY = 1 << 30
"""Bytes of /dev/shm below which NCCL's buffers between the GPUs of a machine may not fit."""
CLOCK_SKEW_SECONDS = 30.0

logger = logging.getLogger(__name__)


def check_launcher() -> None:
    """Raise Unavailable when torchrun's variables are missing or contradict each other."""
    given: dict[str, int] = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        text = os.environ.get(name)
        if text is not None and not text.isdecimal():
            raise Unavailable(f"the variable {name} = {text!r} is no number: start the ranks with torchrun")
        if text is not None:
            given[name] = int(text)
    rank, world = given.get("RANK", 0), given.get("WORLD_SIZE", 1)
    if rank >= world:
        raise Unavailable(f"RANK = {rank} is not below WORLD_SIZE = {world}: start the ranks with torchrun")
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if world > 1 and missing:
        raise Unavailable(
            f"WORLD_SIZE = {world}, but {', '.join(missing)} is not set: start the ranks with torchrun"
        )


def check_device(run: Run, device: torch.device) -> None:
    """Raise ConfigError when this rank's GPU has no room for a stage, or the host for what is kept there.

    On the CPU no memory is compared. Raises Unavailable when the device cannot multiply as ``model.fp8``
    says.
    """
    fp8.check(run.model.fp8, device)
    if device.type == "cuda":
        check_memory(run, torch.cuda.get_device_properties(device).total_memory / GIB)
        check_host_memory(run, psutil.virtual_memory().available / GIB)


def check_folder(run: Run) -> None:
    """Write, sync and rename a file in the run's folder on every machine, and read what rank 0 wrote there.

    Raises Unavailable, on every rank, naming the ranks that cannot. Every rank must call this.
    """
    folder, rank = Path(run.dir), dist.get_rank()
    token: list[str] = [uuid.uuid4().hex]
    dist.broadcast_object_list(token, src=0)
    shared = folder / f"probe-{token[0]}"
    wrong = _tried(folder, f"probe-{token[0]}", rank) if _speaks_for_its_machine() else None
    dist.barrier()
    if wrong is None and not shared.exists():
        wrong = f"does not see what rank 0 writes to {folder.absolute()}"
    told: list[tuple[str, str | None]] = [("", None)] * dist.get_world_size()
    dist.all_gather_object(told, (socket.gethostname(), wrong))
    if rank == 0:
        shared.unlink(missing_ok=True)
    failed = [(each, *told[each]) for each in range(len(told)) if told[each][1]]
    if failed:
        first, host, why = failed[0]
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise Unavailable(f"rank {first} on {host}{more} {why}: give dir a folder that all nodes share")


def _tried(folder: Path, name: str, rank: int) -> str | None:
    """What goes wrong when this rank writes durably to ``folder``; rank 0 leaves the file for the others."""
    partial = folder / f"{name}.{rank}.part"
    target = folder / (name if rank == 0 else f"{name}.{rank}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with partial.open("w") as file:
            file.write(name)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(target)
        if rank:
            target.unlink()
    except OSError as error:
        return f"cannot write to {folder.absolute()} ({error.strerror})"
    return None


def _speaks_for_its_machine() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0" or dist.get_rank() == 0


def warn_of_shortages(run: Run, device: torch.device) -> None:
    """Log, on rank 0, what will probably end the run later: numbers, and what to do. Every rank must call
    this."""
    told: list[tuple[float, str]] = [(0.0, "")] * dist.get_world_size()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    dist.barrier()
    dist.all_gather_object(told, (time.time(), name))
    if dist.get_rank() == 0:
        for sentence in (*_shortages(run, device), *_differences(told)):
            logger.warning("%s", sentence)


def checkpoint_bytes(run: Run) -> int:
    """About what one checkpoint of ``run`` takes: parameters, and fp32 master weights and two moments."""
    parameter = 2 if run.model.precision is Precision.bf16 else 4
    return count_parameters(run.model).total * (parameter + 3 * 4)


def _shortages(run: Run, device: torch.device) -> Iterator[str]:
    folder = Path(run.dir)
    free, needed = shutil.disk_usage(folder).free, 2 * checkpoint_bytes(run)
    if free < needed:
        yield (
            f"{folder} has {free / 2**30:.1f} GiB free, and two checkpoints need about {needed / 2**30:.1f}: "
            "make room, or give dir a larger disk"
        )
    if (short := host_shortage(run, psutil.virtual_memory().available / GIB)) is not None:
        yield short
    if _file_system(folder) in ("tmpfs", "ramfs"):
        yield f"{folder} lies in memory: its checkpoints are gone when the machine restarts"
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FEW_FILES:
        yield f"a process may open {soft} files only; ranks with many connections need more: ulimit -n 65536"
    share, threads = _cores() // run.cluster.ranks_per_node, torch.get_num_threads()
    if run.optim.offload is Offload.cpu and 2 * threads <= share:
        yield (
            f"AdamW on the host updates with {threads} of the {share} cores that each rank has: set "
            f"cluster.threads_per_rank={share}"
        )
    memory = Path("/dev/shm")
    if device.type == "cuda" and memory.is_dir():
        size = shutil.disk_usage(memory).total
        if size < SMALL_SHARED_MEMORY:
            yield f"/dev/shm has {size / 2**20:.0f} MiB; start a container with --ipc=host or --shm-size=8g"


def _cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _differences(told: list[tuple[float, str]]) -> Iterator[str]:
    clocks = [now for now, _ in told]
    if max(clocks) - min(clocks) > CLOCK_SKEW_SECONDS:
        late, early = clocks.index(min(clocks)), clocks.index(max(clocks))
        yield (
            f"the clocks of rank {late} and rank {early} are {max(clocks) - min(clocks):.0f} s apart: time "
            "limits are kept by the wrong one; synchronise them (NTP)"
        )
    devices = sorted({name for _, name in told})
    if len(devices) > 1:
        yield f"ranks compute on {', '.join(devices)}: every step waits for the slowest, and bits may differ"


def _file_system(folder: Path) -> str:
    """Type of the file system that holds ``folder``; empty where the system does not tell."""
    best, kind = "", ""
    try:
        mounts = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return ""
    where = str(folder.resolve())
    for line in mounts:
        point, found = line.split()[1:3]
        inside = where == point or where.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, found
    return kind
