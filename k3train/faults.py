"""Faults on purpose: named points in the program that do nothing unless a plan says what breaks there.

A plan is a JSON file named by the variable K3TRAIN_FAULTS, which every rank of a run reads when it starts::

    {"log": "faults.jsonl",
     "faults": [{"point": "ckpt.shard", "kind": "kill", "rank": 1, "step": 8},
                {"point": "data.load", "kind": "slow", "seconds": 0.5, "times": 0, "restart": null}]}

``POINTS`` lists every point and ``Kind`` every kind; ``Fault`` says what the other keys mean.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3train.config.json_file import read_json
from k3train.config.keys import closest_word
from k3train.config.problems import BadInput

if TYPE_CHECKING:
    from torch import Tensor

    type Tensors = Callable[[], Iterable[tuple[str, Tensor]]]

PLAN_VARIABLE = "K3TRAIN_FAULTS"


class Kind(StrEnum):
    """What happens at a point."""

    kill = "kill"
    """The process gets SIGKILL, as from the kernel when memory runs out."""
    exception = "exception"
    """InjectedFault is raised."""
    hang = "hang"
    """The thread sleeps for ``seconds``, or for ever without them."""
    slow = "slow"
    """The thread sleeps for ``seconds`` and goes on."""
    flip = "flip"
    """Bit ``bit`` of the first element of a tensor is inverted."""
    nan = "nan"
    """The first element of a tensor becomes NaN."""
    scale = "scale"
    """A tensor is multiplied by ``factor``."""
    enospc = "enospc"
    """OSError "No space left on device" is raised."""


_FOR_EVER_SECONDS = 1e8
"""Longer than any run; time.sleep refuses the largest number that it could hold."""
_ON_TENSORS = (Kind.flip, Kind.nan, Kind.scale)

TENSOR_POINTS: dict[str, str] = {
    "step.loss": "a micro-batch's loss per token is computed (ranks with the last chunk)",
    "step.backward": "this rank's own gradients are summed, before ranks reduce them",
    "step.gradients": "gradients are reduced, before anything judges them",
    "step.weights": "the optimizer has stepped: parameters",
    "step.moments": "the optimizer has stepped: fp32 master weights and moments of this rank",
}
"""Points with tensors, where ``flip``, ``nan`` and ``scale`` are possible too."""

POINTS: dict[str, str] = {
    "setup.start": "the process group stands; no checkpoint has been looked for",
    "setup.built": "a stage's model, optimizer and data are built",
    "setup.restored": "the newest checkpoint is loaded into them",
    "data.load": "the loader's thread begins to assemble a step's micro-batches",
    "data.next": "training asks for the step's micro-batches",
    "step.begin": "a step begins",
    "step.forward": "a micro-batch's forward pass begins, in training and evaluation",
    **TENSOR_POINTS,
    "step.update": "before the optimizer steps",
    "step.end": "a step is done but not yet recorded",
    "eval.batch": "before each held-out batch",
    "ckpt.verify": "before this rank reads its share of a checkpoint's files to verify them",
    "ckpt.begin": "a save begins; nothing is written",
    "ckpt.shard": "before each tensor that this rank writes: a later occurrence is in mid-file",
    "ckpt.after_shard_write": "this rank's tensors are written, its small files are not",
    "ckpt.manifest": "every digest is known, before the manifest is written (rank 0)",
    "ckpt.rename": "the folder is complete under its temporary name (rank 0)",
    "ckpt.pointer": "the folder has its final name; LATEST still names the one before (rank 0)",
    "ckpt.prune": "before older checkpoints are deleted",
    "ckpt.mid_prune": "an old checkpoint is renamed but not yet deleted (rank 0)",
}
"""Every injection point and the moment it stands for."""


class InjectedFault(RuntimeError):
    """The exception that a plan asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One thing that breaks, and when. In a plan it is a JSON object with these keys."""

    point: str
    """One of POINTS."""
    kind: Kind
    rank: int | None = None
    """The rank it happens on; null for every rank."""
    step: int | None = None
    """Only in this step, counted from 1: the one in progress, else the one before; 0 before any."""
    occurrence: int = 1
    """Which time the point is reached, from 1, counting only when rank, step and restart fit."""
    times: int = 1
    """How many times in a row it then happens; 0 for ever."""
    restart: int | None = 0
    """Which start of the ranks under one supervisor, from 0; null for every one."""
    seconds: float | None = None
    """Length of hang and slow. A kill comes so much later, wherever the program then is."""
    tensor: str = ""
    """flip, nan, scale: the first tensor whose name contains this."""
    bit: int = 0
    """flip: which bit, from the least significant."""
    factor: float = 1.0
    """scale: by how much."""


class _Plan:
    """The faults of this process and what it has reached so far."""

    def __init__(self, faults: list[Fault], log: Path | None) -> None:
        rank = int(os.environ.get("RANK", "0"))
        restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self._log, self._rank, self._restart = log, rank, restart
        self._step = 0
        self._last = ""
        self._faults = [f for f in faults if f.rank in (None, rank) and f.restart in (None, restart)]
        self._reached = dict.fromkeys(range(len(self._faults)), 0)

    def reach(self, name: str, step: int | None, tensors: Tensors | None) -> None:
        if name not in POINTS:
            raise KeyError(f"{name} is not in k3train.faults.POINTS")
        self._last = name
        if step is not None:
            self._step = step
        for index, fault in enumerate(self._faults):
            if fault.point != name or fault.step not in (None, self._step):
                continue
            self._reached[index] += 1
            since = self._reached[index] - fault.occurrence
            if since >= 0 and (fault.times == 0 or since < fault.times):
                self._happen(fault, tensors)

    def _happen(self, fault: Fault, tensors: Tensors | None) -> None:
        match fault.kind:
            case Kind.kill if fault.seconds is not None:
                timer = threading.Timer(fault.seconds, self._kill, [fault])
                timer.daemon = True
                timer.start()
            case Kind.kill:
                self._kill(fault)
            case Kind.exception:
                self._tell(fault)
                raise InjectedFault(f"injected at {fault.point}")
            case Kind.hang | Kind.slow:
                self._tell(fault)
                time.sleep(fault.seconds if fault.seconds is not None else _FOR_EVER_SECONDS)
            case Kind.enospc:
                self._tell(fault)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"injected at {fault.point}")
            case Kind.flip | Kind.nan | Kind.scale:
                self._tell(fault, _damage(fault, tensors))

    def _kill(self, fault: Fault) -> None:
        self._tell(fault)
        os.kill(os.getpid(), signal.SIGKILL)

    def _tell(self, fault: Fault, tensor: str = "") -> None:
        record = {
            "point": fault.point,
            "kind": fault.kind,
            "rank": self._rank,
            "step": self._step,
            "last": self._last,
            "tensor": tensor,
            "restart": self._restart,
            "pid": os.getpid(),
            "monotonic": time.monotonic(),
        }
        if self._log is None:
            print(f"rank {self._rank}: injected fault {json.dumps(record)}", file=sys.stderr, flush=True)
            return
        with self._log.open("a") as file:  # one write: ranks share the file
            file.write(json.dumps(record) + "\n")


_plan: _Plan | None = None


def point(name: str, *, step: int | None = None, tensors: Tensors | None = None) -> None:
    """Let the plan's fault happen here, if there is a plan and this is its moment.

    ``step`` is the number of the step that now begins, from 1; ``tensors`` gives what flip, nan and scale
    may change in place, by name.
    """
    if _plan is not None:
        _plan.reach(name, step, tensors)


def plan_from_environment() -> None:
    """Follow the plan that K3TRAIN_FAULTS names from now on; without the variable, none.

    Raises BadInput when the plan cannot be followed.
    """
    global _plan
    path = os.environ.get(PLAN_VARIABLE)
    _plan = _Plan(*read_plan(Path(path))) if path else None


def read_plan(path: Path) -> tuple[list[Fault], Path | None]:
    """The faults of a plan file and the file that records when they happen. Raises BadInput."""
    fix = f"correct it, or the variable {PLAN_VARIABLE}"
    try:
        plan = read_json(path, BadInput, fix)
    except FileNotFoundError:
        raise BadInput(f"{path} is missing; {fix}") from None
    listed = isinstance(plan, dict) and isinstance(plan.get("faults"), list)
    if not listed or plan.keys() - {"faults", "log"}:
        raise BadInput(f'{path}: write {{"faults": [...]}}, and "log" with a file name if you want a record')
    log = plan.get("log")
    if log is not None and not isinstance(log, str):
        raise BadInput(f"{path}: log = {log!r} must be the name of a file")
    faults = [_fault(f"{path}: faults[{i}]", entry) for i, entry in enumerate(plan["faults"])]
    return faults, Path(log) if log else None


def _fault(where: str, entry: Any) -> Fault:
    if not isinstance(entry, dict):
        raise BadInput(f"{where} = {entry!r} must be an object with point and kind")
    known = {field.name: field for field in fields(Fault)}
    for key in entry:
        if key not in known:
            raise BadInput(f"{where}: {key} is not a key of a fault; there are {', '.join(known)}")
    for name, field in known.items():
        if field.default is MISSING and name not in entry:
            raise BadInput(f"{where} has no {name}")
    _check_word(where, "point", entry["point"], list(POINTS))
    _check_word(where, "kind", entry["kind"], list(Kind))
    fault = Fault(**{**entry, "kind": Kind(entry["kind"])})
    for name, low, optional in _NUMBERS:
        value = getattr(fault, name)
        if not (value is None and optional) and (
            isinstance(value, bool) or not isinstance(value, int) or value < low
        ):
            raise BadInput(f"{where}: {name} = {value!r} must be a whole number from {low}")
    for name in ("seconds", "factor"):
        value = getattr(fault, name)
        if not (value is None and name == "seconds") and (
            isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf")
        ):
            raise BadInput(f"{where}: {name} = {value!r} must be a number from 0")
    if fault.kind is Kind.slow and fault.seconds is None:
        raise BadInput(f"{where}: kind slow needs seconds")
    if fault.kind in _ON_TENSORS and fault.point not in TENSOR_POINTS:
        raise BadInput(
            f"{where}: {fault.point} has no tensors for kind {fault.kind}; use {', '.join(TENSOR_POINTS)}"
        )
    if not isinstance(fault.tensor, str):
        raise BadInput(f"{where}: tensor = {fault.tensor!r} must be a part of a tensor's name")
    return fault


_NUMBERS = (
    ("rank", 0, True),
    ("step", 0, True),
    ("occurrence", 1, False),
    ("times", 0, False),
    ("restart", 0, True),
    ("bit", 0, False),
)


def _check_word(where: str, key: str, value: Any, choices: list[str]) -> None:
    if value not in choices:
        near = closest_word(str(value), choices)
        hint = f"did you mean {near}?" if near else f"there are {', '.join(choices)}"
        raise BadInput(f"{where}: {key} = {value!r} is not known; {hint}")


def _damage(fault: Fault, tensors: Tensors | None) -> str:
    """Change the first fitting tensor in place; returns its name."""
    given = tensors() if tensors else ()
    name, tensor = next(((n, t) for n, t in given if fault.tensor in n and t.numel()), ("", None))
    if tensor is None:
        raise BadInput(f"fault at {fault.point}: no tensor's name on this rank contains {fault.tensor!r}")
    import torch

    # .data: what autograd has saved must not learn of the change, as it does not of a bit that flips.
    first = (0,) * tensor.dim()
    match fault.kind:
        case Kind.nan:
            tensor.data[first] = float("nan")
        case Kind.scale:
            tensor.data.mul_(fault.factor)
        case _:
            bits = 8 * tensor.element_size()
            if fault.bit >= bits:
                raise BadInput(f"fault at {fault.point}: bit {fault.bit} of {name}, which has {bits} bits")
            whole = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32, 64: torch.uint64}[bits]
            word = tensor.data.view(whole)[first]
            word.copy_(torch.tensor(int(word) ^ 1 << fault.bit, dtype=whole))
    return name
