"""Starts a node's ranks and starts them again when one dies: torch's elastic agent with a policy of ours.

The agent meets the other nodes, starts the ranks, watches them and restarts all of them together. Added here:
what is never restarted, an error of the program that comes again among it, a wait that doubles, a limit on
failures in a row without a new checkpoint, and a short grace for the survivors, which gloo and NCCL may leave
waiting for a dead rank.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed.elastic.rendezvous.registry as rendezvous
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import (
    DefaultLogsSpecs,
    MultiprocessContext,
    SubprocessContext,
)
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError
from torch.distributed.launcher.api import LaunchConfig

from k3train.checkpoint.listing import committed
from k3train.config.trained import CHECKPOINTS
from k3train.train.failure import forget_failures, read_failures
from k3train.train.health import unhealthy
from k3train.train.signals import (
    EXIT_BAD_INPUT,
    EXIT_BAD_STEP,
    EXIT_DONE,
    EXIT_ENVIRONMENT,
    EXIT_STOPPED,
    EXIT_UNEXPECTED,
)

NEVER_RESTARTED = (EXIT_BAD_INPUT, EXIT_ENVIRONMENT, EXIT_BAD_STEP, EXIT_STOPPED)
"""Codes of a rank after which another start would end the same way, or is not wanted."""

SURVIVOR_GRACE_SECONDS = 3
"""From SIGTERM to SIGKILL for the other ranks when one has failed: they may wait for it in a collective."""

STOPPED_GRACE_SECONDS = 30
"""The same when the ranks that ended did so on purpose: the others are about to."""

LONGEST_DELAY_SECONDS = 300.0

NO_LOGS = DefaultLogsSpecs(log_dir=os.devnull)
"""Ranks write to the launcher's own output; torch's default leaves a folder in TMPDIR for every start."""

EVENTS = "supervisor.jsonl"
"""File in the run's folder with every failure and restart that a supervisor has seen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """When to start again."""

    run_dir: Path
    stop_file: Path
    """Asks the ranks to stop; also cuts a wait short."""
    max_restarts: int
    """Failures in a row, without a new checkpoint in between, after which the next one ends the run."""
    delay_seconds: float
    """Wait before the first restart of a row; doubles with each."""


class Supervisor(LocalElasticAgent):
    """torch's agent for one node's ranks, with ``Policy``.

    pyright does not see through the timing decorator on torch's methods.
    """

    def __init__(self, policy: Policy, *, spec: WorkerSpec, **options: Any) -> None:
        super().__init__(spec, **options)
        self._policy = policy
        self._starts = -1
        self._in_a_row = 0
        self._noticed = 0.0
        self._newest = self._newest_checkpoint()
        self.failed: dict[int, int] = {}
        """Exit code of each rank that failed by itself, at the last failure."""
        self.sick = ""
        """Why this node must not be used again, if so."""
        self._errors: set[str] = set()
        self.comes_again = ""
        """The error of the program that ended two starts in a row, if so."""

    def _newest_checkpoint(self) -> tuple[int, int]:
        """When the newest checkpoint was written, in ns, and its step: a run that has gone back writes new
        ones below the old ones' steps."""
        found = []
        for step, path in committed(self._policy.run_dir / CHECKPOINTS):
            with contextlib.suppress(OSError):
                found.append((path.stat().st_mtime_ns, step))
        return max(found, default=(0, 0))

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        # torch 2.11 hands out the first round's store for ever: its keys are stale, and its node may be gone.
        worker_group.spec.rdzv_handler._bootstrap_store_info = None  # pyright: ignore
        super()._rendezvous(worker_group)  # pyright: ignore[reportCallIssue]
        # Ranks are told which start this is: nodes that joined later, or saw a failure first, count alike.
        store, size = worker_group.store, worker_group.group_world_size or 1
        assert store is not None
        store.set(f"starts/{worker_group.group_rank}", str(self._starts + 1))
        self._starts = max(int(store.get(f"starts/{each}")) for each in range(size))

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        spec.max_restarts = self._starts + self._remaining_restarts  # the agent's count is their difference
        forget_failures(self._policy.run_dir, _ranks(worker_group))
        started = super()._start_workers(worker_group)  # pyright: ignore[reportCallIssue]
        context: Any = self._pcontext
        close, closed = context.close, False

        def close_soon(death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
            nonlocal closed
            ended = {local: code for local, code in _exit_codes(context).items() if code is not None}
            if not closed:  # later, the agent itself has ended the others
                self._noticed = time.monotonic()
                ranks = worker_group.workers
                self.failed = {ranks[local].global_rank: code for local, code in ended.items() if code}
            closed = True
            calm = set(ended.values()) <= {EXIT_DONE, EXIT_STOPPED}
            close(death_sig, timeout=min(timeout, STOPPED_GRACE_SECONDS if calm else SURVIVOR_GRACE_SECONDS))

        context.close = close_soon
        self._tell("started", start=self._starts, nodes=worker_group.group_world_size)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self._pcontext is not None
        if any(_exit_codes(self._pcontext).values()):
            self._pcontext.close()  # torch would give the others of a forked rank 30 seconds
        result = super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue]
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            self._remaining_restarts = self._judge(worker_group)
        return result

    def _judge(self, worker_group: WorkerGroup) -> int:
        """How many more restarts are allowed after this failure: none, or the rest of the row."""
        before, self._errors = self._errors, read_failures(self._policy.run_dir, _ranks(worker_group))
        self.comes_again = min(before & self._errors, default="")
        newest = self._newest_checkpoint()
        self._in_a_row = 1 if newest > self._newest else self._in_a_row + 1
        self._newest = newest
        left = max(0, self._policy.max_restarts - self._in_a_row + 1)
        if self.comes_again or any(code in NEVER_RESTARTED for code in self.failed.values()):
            left = 0
        elif left and (reason := unhealthy()):
            left, self.sick = 0, reason
        self._tell(
            "failed",
            start=self._starts,
            noticed=self._noticed,
            ranks=self.failed,
            in_a_row=self._in_a_row,
            newest_checkpoint=newest[1],
            restarts=left > 0,
            sick=self.sick,
            comes_again=self.comes_again,
        )
        return left

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state is not WorkerState.HEALTHY:  # healthy: a node has joined
            self._stop_workers(worker_group)  # pyright: ignore[reportCallIssue]
            delay = min(self._policy.delay_seconds * 2 ** min(self._in_a_row - 1, 30), LONGEST_DELAY_SECONDS)
            of = f"{self._in_a_row} of {self._policy.max_restarts}"
            print(
                f"{describe(self.failed)}: all ranks start again in {delay:g} s from the newest checkpoint "
                f"(restart {of} before a new one)",
                file=sys.stderr,
                flush=True,
            )
            until = time.monotonic() + delay
            while time.monotonic() < until and not self._policy.stop_file.exists():
                time.sleep(min(0.2, max(0.0, until - time.monotonic())))
        super()._restart_workers(worker_group)  # pyright: ignore[reportCallIssue]

    def _tell(self, event: str, **detail: Any) -> None:
        record = {
            "event": event,
            "time": time.time(),
            "monotonic": time.monotonic(),
            "node": socket.gethostname(),
            **detail,
        }
        with contextlib.suppress(OSError), (self._policy.run_dir / EVENTS).open("a") as file:
            file.write(json.dumps(record) + "\n")


def supervise(config: LaunchConfig, entrypoint: Callable[..., Any] | str, *args: Any, policy: Policy) -> int:
    """Run this node's ranks to the end of the run; returns the run's exit code.

    ``entrypoint`` is a program, or a function that ends its process with the rank's code unless that is 0.
    SIGINT and SIGTERM make the stop file, so that the ranks save and end by themselves: the agent's own
    handling would kill them 30 seconds later whether they had saved or not. A second signal does just that.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # ranks speak for themselves
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    agent = None
    with stop_on_signals(policy.stop_file):
        try:
            spec = WorkerSpec(
                role=config.role,
                local_world_size=config.nproc_per_node,
                entrypoint=entrypoint,
                args=args,
                rdzv_handler=rendezvous.get_rendezvous_handler(parameters),
                max_restarts=policy.max_restarts,
                monitor_interval=config.monitor_interval,
                local_addr=config.local_addr,
                numa_options=config.numa_options,
            )
            assert config.logs_specs is not None
            agent = Supervisor(
                policy, spec=spec, logs_specs=config.logs_specs, start_method=config.start_method
            )
            try:
                result: Any = agent.run()
            finally:
                if not agent.sick:  # closing would end the other nodes too
                    spec.rdzv_handler.shutdown()
        except KeyboardInterrupt:
            return EXIT_UNEXPECTED
        except RendezvousClosedError:
            print("another node has ended the run", file=sys.stderr)
            return exit_code(list(agent.failed.values())) if agent else EXIT_UNEXPECTED
        except RendezvousError as error:
            print(f"the nodes did not meet at {config.rdzv_endpoint}: {error}", file=sys.stderr)
            return EXIT_UNEXPECTED
    if not result.is_failed():
        return EXIT_DONE
    code = exit_code(list(agent.failed.values()))
    if code == EXIT_UNEXPECTED:
        why = f"; this node is not used again: {agent.sick}" if agent.sick else ""
        if agent.comes_again:
            why = f"; twice in a row by {agent.comes_again}, which another start would meet again: mend it"
        print(
            f"{describe(agent.failed)}{why}; start again to go on from the last checkpoint", file=sys.stderr
        )
    return code


@contextlib.contextmanager
def stop_on_signals(stop_file: Path) -> Iterator[None]:
    """Make SIGTERM and SIGINT ask the ranks to stop; a second one ends them at once."""
    asked = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        print("stopping after this step; once more stops at once", file=sys.stderr, flush=True)
        stop_file.touch()
        with contextlib.suppress(OSError):  # a full disk must not keep the run from stopping
            stop_file.write_text(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_code(codes: list[int]) -> int:
    """The code that tells most: 75 when every rank that failed says so, else the first other code of a rank's
    own, bad input and environment before others, else 1 (killed)."""
    if codes and all(code == EXIT_STOPPED for code in codes):
        return EXIT_STOPPED
    own = [code for code in codes if code > 0 and code != EXIT_STOPPED]
    final = [code for code in own if code in (EXIT_BAD_INPUT, EXIT_ENVIRONMENT)]
    return (final or own or [EXIT_UNEXPECTED])[0]


def describe(failed: dict[int, int]) -> str:
    """Which ranks failed and how, in a few words; those that a signal ended, if any, since others follow."""
    killed = {rank: code for rank, code in failed.items() if code < 0}
    words = [
        f"rank {rank} was ended by {signal.Signals(-code).name}"
        if code < 0
        else f"rank {rank} ended with {code}"
        for rank, code in (killed or failed).items()
    ]
    more = len(words) - 4
    return ", ".join(words[:4]) + (f" and {more} more" if more > 0 else "") if words else "a rank failed"


def _ranks(worker_group: WorkerGroup) -> list[int]:
    return [worker.global_rank for worker in worker_group.workers]


def _exit_codes(context: Any) -> dict[int, int | None]:
    """Exit code of each local rank; None while it runs."""
    if isinstance(context, SubprocessContext):
        return {local: each.proc.poll() for local, each in context.subprocess_handlers.items()}
    assert isinstance(context, MultiprocessContext), context
    processes = context._pc.processes if context._pc else []
    return {local: process.exitcode for local, process in enumerate(processes)}
