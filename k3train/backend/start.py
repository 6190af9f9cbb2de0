"""Start and end of a rank: device, threads, process group."""

from __future__ import annotations

import logging
import multiprocessing.util
import os
import random
import sys
import warnings
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from k3train.backend import cpu_bridge, mcore_fixes
from k3train.config.problems import Unavailable
from k3train.config.schema import Device


def start_backend(device: Device = Device.auto, *, threads: int = 1) -> torch.device:
    """Choose the device of this process and prepare megatron-core for it.

    Call it before importing megatron where nvidia-resiliency-ext may be installed: with a version below 0.6
    that import fails.

    With a GPU the device is ``cuda:LOCAL_RANK``. Raises Unavailable when ``device=cuda`` finds no GPU.
    """
    _quiet_libraries()
    mcore_fixes.before_import()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if wants_gpus(device, local_rank + 1):
        # One hardware queue keeps the order of communication and compute that megatron-core relies on.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        chosen = torch.device("cuda", local_rank)
        torch.cuda.set_device(chosen)
    else:
        torch.set_num_threads(threads)
        cpu_bridge.install(force=True)
        chosen = torch.device("cpu")
    mcore_fixes.apply()
    return chosen


def wants_gpus(device: Device, ranks: int) -> bool:
    """Whether this machine's first ``ranks`` ranks compute on GPUs; takes none of them.

    Raises Unavailable when they should and there are too few.
    """
    if device is Device.cpu or (device is Device.auto and not torch.cuda.is_available()):
        return False
    if not torch.cuda.is_available():
        raise Unavailable("device=cuda, but torch sees no GPU: set device=cpu or run where nvidia-smi works")
    if ranks > (count := torch.cuda.device_count()):
        raise Unavailable(
            f"this machine has {count} GPU{'s' if count != 1 else ''}, and its rank {ranks - 1} "
            f"(counted from 0) needs one too: set cluster.ranks_per_node={count}, or device=cpu"
        )
    return True


def _quiet_libraries() -> None:
    """Silence what megatron-core and torch say about choices that k3train has made on purpose.

    Among them: no TransformerEngine or apex, checkpoints written without nvidia-resiliency-ext, checkpoint
    files read by every rank for itself.
    """
    for module in ("megatron", "torch", "transformer_engine"):
        warnings.filterwarnings("ignore", module=rf"{module}(\.|$)")
        logging.getLogger(module).setLevel(logging.ERROR)


def start_processes(device: torch.device, *, timeout_seconds: int, init_method: str = "env://") -> None:
    """Join the process group: NCCL on GPUs, gloo on the CPU. Every rank must call this.

    Rank and world size come from RANK and WORLD_SIZE, which torchrun sets; without them, a world of one.
    """
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    # A lone process needs no rendezvous, hence no free port.
    alone = os.environ["WORLD_SIZE"] == "1"
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.HashStore() if alone else None,
        init_method=None if alone else init_method,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=timeout_seconds),
        device_id=device if device.type == "cuda" else None,
    )


def stop_processes() -> None:
    """Leave the process group, for a process that goes on without it. Every rank must call this."""
    dist.destroy_process_group()


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch on this rank."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def end_process(code: int) -> None:
    """Leave this process with ``code`` without running interpreter teardown; never returns.

    gloo's threads sometimes abort a process that exits normally after all its work is done
    (pytorch/pytorch#190489), and megatron-core's checkpoint helpers leave a manager process behind unless
    multiprocessing's own exit function runs.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    multiprocessing.util._exit_function()  # pyright: ignore[reportAttributeAccessIssue]
    os._exit(code)
