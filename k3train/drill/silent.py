"""The faults of the matrix that are not the end of a rank: bad numbers, lost memory, lost nodes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

import k3train
from k3train.checkpoint.folder import step_name
from k3train.checkpoint.manifest import read_manifest
from k3train.config.compose import save_resolved
from k3train.config.schema import Guards, OnNonFinite, OnSpike, Run
from k3train.drill.bench import Bench, read_trained
from k3train.drill.row import Row, Seen
from k3train.drill.tiny import LAYOUTS
from k3train.drill.waiting import meanwhile, pid_of_fault, wait_for
from k3train.train.signals import EXIT_DONE, EXIT_HARDWARE
from k3train.train.supervisor import EVENTS
from k3train.train.verdict import RECORDS

TWO, THREE, FOUR = LAYOUTS
NODE = Path(k3train.__path__[0]).parent / "launch" / "node.py"


def nan_in_data(bench: Bench) -> Seen:
    """#6: a gradient is NaN each time that the step is computed."""
    run = bench.new_run(TWO)
    run.guards = Guards(nonfinite=OnNonFinite.skip)
    run.checkpoint = replace(run.checkpoint, every_steps=1, keep=20)
    fault = {"point": "step.backward", "kind": "nan", "rank": 1, "step": 6, "times": 0, "tensor": "experts"}
    outcome = bench.start(run, [fault])
    record = _record(run, 6)
    before, after = (_tensor_files(run, step) for step in (5, 6))
    losses = dict(read_trained(run).losses)
    golden = dict(bench.expected(TWO).losses)
    same = all(losses.get(step) == golden[step] for step in range(1, 7))
    verdict = (record.get("computed_again") or {}).get("verdict")
    return Seen(
        as_expected=outcome.code == EXIT_DONE and verdict == "same" and before == after and same,
        words=f"step {record.get('action')}, computed again: {verdict}; weights and moments "
        f"{'as before' if before == after else 'CHANGED'}",
        detect_seconds=0.0,
        lost_steps=0,
        details=outcome.output,
    )


def nan_in_hardware(bench: Bench) -> Seen:
    """#7: a gradient is NaN once, on one rank."""
    run = bench.new_run(TWO, restarts=1)
    fault = {"point": "step.backward", "kind": "nan", "rank": 1, "step": 6}
    outcome = bench.start(run, [fault])
    record = _record(run, 6).get("computed_again") or {}
    code = set(outcome.failures[0]["ranks"].values()) if outcome.failures else None
    trained = read_trained(run)
    differ = trained.differ_from(bench.expected(TWO))
    named = record.get("suspects")
    return Seen(
        as_expected=outcome.code == EXIT_DONE
        and not differ
        and record.get("verdict") == "transient"
        and named == [1]
        and code == {EXIT_HARDWARE},
        words=f"{record.get('verdict')}, ranks {named} suspected, code {code}; then {differ} losses differ",
        detect_seconds=max(outcome.detect_seconds(), default=0.0),
        lost_steps=trained.lost_steps(),
        details=outcome.output,
    )


def spike(bench: Bench) -> Seen:
    """#8: one batch's gradient is a thousand times too large."""
    run = bench.new_run(TWO)
    run.guards = Guards(spike=OnSpike.skip)
    run.curriculum.order = ["short"]
    run.curriculum.stages = {"short": replace(run.curriculum.stages["short"], tokens=768 * 14)}
    fault = {"point": "step.backward", "kind": "scale", "factor": 1000, "step": 11, "times": 0}
    outcome = bench.start(run, [fault])
    folder = Path(run.dir) / RECORDS
    found = sorted(path.stem for path in folder.glob("step_*.json"))
    record = _record(run, 11)
    return Seen(
        as_expected=outcome.code == EXIT_DONE
        and found == ["step_00000011"]
        and (record.get("kind"), record.get("action")) == ("spike", "skip"),
        words=f"{record.get('kind')} in step 11, {record.get('action')}; alarms in {len(found)} of 14 steps",
        detect_seconds=0.0,
        lost_steps=0,
        details=outcome.output,
    )


def no_memory(bench: Bench) -> Seen:
    """#20: a rank may have no more memory."""
    run = bench.new_run(TWO, restarts=1)
    mark = [{"point": "step.end", "kind": "slow", "seconds": 0.5, "rank": 1, "step": 5}]

    def starve() -> None:
        process = psutil.Process(pid_of_fault(run, 5))
        limit = process.memory_info().vms + 2**16
        process.rlimit(psutil.RLIMIT_AS, (limit, limit))

    with meanwhile(starve):
        outcome = bench.start(run, mark)
    trained = read_trained(run)
    differ = trained.differ_from(bench.expected(TWO))
    failed = [list(failure["ranks"].values()) for failure in outcome.failures]
    return Seen(
        as_expected=outcome.code == EXIT_DONE and len(failed) == 1 and not differ,
        words=f"ranks ended with {failed}; started again {differ} losses differ",
        detect_seconds=max(outcome.detect_seconds(), default=None),
        lost_steps=trained.lost_steps(),
        details=outcome.output,
    )


def lost_node(bench: Bench) -> Seen:
    """#4: one of two nodes goes with all that runs on it; the other goes on alone."""
    if not NODE.exists():
        return Seen(as_expected=False, words="launch/node.py is part of a checkout, which this is not")
    run = bench.new_run(THREE, restarts=3)
    run.cluster = replace(run.cluster, nodes=2, ranks_per_node=1, min_nodes=1)
    run.curriculum.stages = {
        name: replace(stage, micro_batch_sequences=1) for name, stage in run.curriculum.stages.items()
    }
    folder = Path(run.dir)
    folder.mkdir()
    save_resolved(run, folder / "run.yaml")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    nodes = [_start_node(run, number, endpoint) for number in (0, 1)]
    try:
        wait_for(lambda: _trained_steps(run) >= 5)
        moment = time.monotonic()
        gone = psutil.Process(nodes[1].pid)
        for process in [*gone.children(recursive=True), gone]:
            process.send_signal(signal.SIGKILL)
        code = nodes[0].wait(300)
    finally:
        for node in nodes:
            _end(node)
    events = [json.loads(line) for line in (folder / EVENTS).read_text().splitlines()]
    noticed = [e["noticed"] for e in events if e["event"] == "failed" and e["noticed"] >= moment]
    alone = [event for event in events if event["event"] == "started" and event["nodes"] == 1]
    trained = read_trained(run)
    golden = dict(bench.expected(THREE).losses)
    worst = max(
        (abs(float.fromhex(loss) / float.fromhex(golden[step]) - 1) for step, loss in trained.losses),
        default=1,
    )
    return Seen(
        as_expected=code == EXIT_DONE and bool(alone) and worst < 1e-5 and not trained.lost_checkpoints(),
        words=f"{len(alone)} start with 1 of 2 nodes, ended with {code}, largest difference {worst:.0e}",
        detect_seconds=noticed[0] - moment if noticed else None,
        lost_steps=trained.lost_steps(),
        details=(folder / "node-0.log").read_text(),
    )


def _start_node(run: Run, number: int, endpoint: str) -> subprocess.Popen[bytes]:
    stop = Path(run.dir) / "STOP"
    words = [sys.executable, str(NODE), "--nodes", "2", "--min-nodes", "1", "--ranks", "1"]
    words += ["--node", str(number), "--endpoint", endpoint, "--id", "drill", "--stop-file", str(stop)]
    words += ["--max-restarts", "3", "--restart-delay", "0", "--last-call", "2"]
    words += ["--", "-m", "k3train.train", str(Path(run.dir) / "run.yaml")]
    path = os.pathsep.join([str(NODE.parents[1]), os.environ.get("PYTHONPATH", "")])
    variables = os.environ | {"SLURMD_NODENAME": "127.0.0.1", "PYTHONPATH": path}
    with (Path(run.dir) / f"node-{number}.log").open("w") as log:
        return subprocess.Popen(words, env=variables, stdout=log, stderr=log, start_new_session=True)


def _end(node: subprocess.Popen[bytes]) -> None:
    if node.poll() is None:
        for process in [*psutil.Process(node.pid).children(recursive=True), psutil.Process(node.pid)]:
            process.kill()
    node.wait()


def _trained_steps(run: Run) -> int:
    return max((step for step, _ in read_trained(run).losses), default=0)


def _record(run: Run, step: int) -> dict[str, Any]:
    """What the guards wrote about a step; nothing when they did not."""
    file = Path(run.dir) / RECORDS / f"{step_name(step)}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def _tensor_files(run: Run, step: int) -> dict[str, Any]:
    """Digests of the files with weights and moments in the checkpoint of a step."""
    manifest = read_manifest(Path(run.dir) / "checkpoints" / step_name(step))
    return {name: entry for name, entry in manifest.files.items() if name.startswith("__")}


SILENT = (
    Row(
        name="node",
        matrix="4",
        fault="one of two nodes is lost, agent and all",
        expected="the other goes on, losses within 1e-5",
        play=lost_node,
    ),
    Row(
        name="nan",
        matrix="6",
        fault="NaN in an expert's gradient on rank 1, each time",
        expected="skipped by all, nothing updated",
        play=nan_in_data,
    ),
    Row(
        name="nan-once",
        matrix="7",
        fault="NaN in a gradient on rank 1, once",
        expected="rank 1 suspected, code 16, same bits",
        play=nan_in_hardware,
    ),
    Row(
        name="spike",
        matrix="8",
        fault="one step's gradient times 1,000",
        expected="found in that step, no other alarm",
        play=spike,
    ),
    Row(
        name="memory",
        matrix="20",
        fault="rank 1 can allocate no more memory",
        expected="all end, started again, same bits",
        play=no_memory,
    ),
)
