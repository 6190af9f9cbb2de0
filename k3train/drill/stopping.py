"""The faults of the matrix that stop a process: killed ranks, signals, stops, and what a start then finds."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from k3train.checkpoint.listing import committed
from k3train.config.schema import Run
from k3train.drill.bench import Bench, Outcome, read_trained
from k3train.drill.kills import FIRST_RANK_ONLY
from k3train.drill.row import Row, Seen
from k3train.drill.tiny import LAYOUTS
from k3train.drill.waiting import meanwhile, pid_of_fault, touch_after_steps
from k3train.train.signals import EXIT_BAD_INPUT, EXIT_DONE, EXIT_STOPPED

TWO, THREE, FOUR = LAYOUTS
IMPATIENT_SECONDS = 30.0
"""A fault that takes longer to be noticed than this is not as expected."""


def judged(bench: Bench, outcome: Outcome, layout: str, *, kills: int) -> Seen:
    """A run that must have been started again ``kills`` times and have trained the golden run's bits."""
    trained = read_trained(outcome.run)
    differ, lost = trained.differ_from(bench.expected(layout)), trained.lost_checkpoints() + outcome.without
    detect = max(outcome.detect_seconds(), default=0.0)
    happened = len(outcome.happened)
    ended = f"{happened} killed, ended with {outcome.code}"
    good = (
        outcome.code == EXIT_DONE
        and happened == len(outcome.failures) == kills
        and not (differ or lost or outcome.orphans)
        and detect < IMPATIENT_SECONDS
    )
    return Seen(
        as_expected=good,
        words=f"{ended}, {differ} losses differ, {lost} checkpoints lost",
        detect_seconds=detect,
        lost_steps=trained.lost_steps(),
        details=outcome.output,
    )


def kill(bench: Bench) -> Seen:
    """#1: a rank dies in the middle of a step."""
    run = bench.new_run(FOUR, restarts=1)
    fault = {"point": "step.forward", "kind": "kill", "rank": 2, "step": 6}
    return judged(bench, bench.start(run, [fault]), FOUR, kills=1)


def kill_while_saving(bench: Bench) -> Seen:
    """#2: every moment of a save, every rank that has it, one after another."""
    moments = ["ckpt.begin", "ckpt.shard", "ckpt.after_shard_write", "ckpt.manifest", "ckpt.rename"]
    moments += ["ckpt.pointer", "ckpt.prune", "ckpt.mid_prune"]
    deaths = [(name, rank) for name in moments for rank in ((0,) if name in FIRST_RANK_ONLY else (0, 1))]
    faults = [
        {
            "point": name,
            "kind": "kill",
            "rank": rank,
            "restart": restart,
            "occurrence": 40 if name == "ckpt.shard" else 1,
        }
        for restart, (name, rank) in enumerate(deaths)
    ]
    run = bench.new_run(TWO, restarts=len(faults))
    return judged(bench, bench.start(run, faults), TWO, kills=len(faults))


def exception(bench: Bench) -> Seen:
    """#1: a rank raises instead of dying."""
    run = bench.new_run(TWO, restarts=1)
    fault = {"point": "step.backward", "kind": "exception", "rank": 1, "step": 5}
    return judged(bench, bench.start(run, [fault]), TWO, kills=1)


def stop_five_times(bench: Bench) -> Seen:
    """#14: the chain of a requeued job."""
    run = bench.new_run(TWO)
    codes = []
    for _ in range(5):
        with meanwhile(lambda: touch_after_steps(run, 1)):
            codes.append(bench.start(run).code)
    codes.append(bench.start(run).code)
    return _stopped(bench, run, codes, [EXIT_STOPPED] * 5 + [EXIT_DONE])


def sigterm(bench: Bench) -> Seen:
    """#15: SIGTERM to one rank, then to the supervisor."""
    run = bench.new_run(TWO)
    mark = [{"point": "step.begin", "kind": "slow", "seconds": 0, "rank": 1, "step": 3}]
    with meanwhile(lambda: os.kill(pid_of_fault(run, 3), signal.SIGTERM)):
        codes = [bench.start(run, mark).code]
    mark[0]["step"] = 7
    with meanwhile(lambda: (pid_of_fault(run, 7), os.kill(os.getpid(), signal.SIGTERM))):
        codes.append(bench.start(run, mark).code)
    codes.append(bench.start(run).code)
    return _stopped(bench, run, codes, [EXIT_STOPPED, EXIT_STOPPED, EXIT_DONE])


def _stopped(bench: Bench, run: Run, codes: list[int], expected: list[int]) -> Seen:
    trained = read_trained(run)
    differ, lost = trained.differ_from(bench.expected(TWO), stopped=True), trained.lost_steps()
    return Seen(
        as_expected=codes == expected and not differ and lost == 0,
        words=f"codes {' '.join(map(str, codes))}, {differ} losses differ",
        lost_steps=lost,
    )


def other_settings(bench: Bench) -> Seen:
    """#16: the run goes on with another seed."""
    run = _interrupted(bench, TWO)
    outcome = bench.start(replace(run, seed=run.seed + 1))
    named = f"seed = {run.seed + 1} was {run.seed}" in outcome.output
    code = bench.start(run).code
    differ = read_trained(run).differ_from(bench.expected(TWO))
    good = outcome.code == EXIT_BAD_INPUT and named and code == EXIT_DONE and not differ
    return Seen(
        as_expected=good,
        words=f"ended with {outcome.code}, {'named the seed' if named else 'named no setting'}; "
        f"with its own settings {differ} losses differ",
        details=outcome.output,
    )


def other_layout(bench: Bench) -> Seen:
    """#17: saved by two ranks, gone on by three, and by four."""
    run = _interrupted(bench, TWO)
    worst, codes, step = 0.0, [], committed(Path(run.dir) / "checkpoints")[0][0]
    golden = dict(bench.expected(TWO).losses)
    for layout in (THREE, FOUR):
        other = bench.copy_run(run, layout)
        codes.append(bench.start(other).code)
        for each, loss in read_trained(other).losses:
            if each > step:
                expected = float.fromhex(golden[each])
                worst = max(worst, abs(float.fromhex(loss) - expected) / expected)
    return Seen(
        as_expected=codes == [EXIT_DONE, EXIT_DONE] and worst < 1e-5,
        words=f"codes {' '.join(map(str, codes))}, largest relative difference {worst:.0e}",
        lost_steps=0,
    )


def damaged_checkpoint(bench: Bench) -> Seen:
    """#10: the newest checkpoint is damaged, each kind of file in another way."""
    run = _interrupted(bench, TWO)
    damages: list[tuple[str, Callable[[Path], Any]]] = [
        ("__0_*", _flip),
        ("__1_*", lambda file: os.truncate(file, file.stat().st_size // 2)),
        (".metadata*", _flip),
        ("train_state.json", Path.unlink),
        ("MANIFEST.json", lambda file: file.write_bytes(b"\0" * file.stat().st_size)),
    ]
    codes, wrong, silent, details = [], 0, 0, ""
    for pattern, damage in damages:
        other = bench.copy_run(run, TWO)
        (newest, folder), (older, _) = committed(Path(other.dir) / "checkpoints")[:2]
        damage(next(folder.glob(pattern)))
        outcome = bench.start(other)
        codes.append(outcome.code)
        trained = read_trained(other)
        wrong += trained.differ_from(bench.expected(TWO))
        silent += trained.starts[-1][2] == newest or f"{folder.name} is passed over" not in outcome.output
        details += outcome.output
        assert older < newest
    return Seen(
        as_expected=set(codes) == {EXIT_DONE} and not wrong and not silent,
        words=f"{len(damages)} damages, {silent} loaded silently, {wrong} losses differ",
        lost_steps=2,
        details=details,
    )


def damaged_corpus(bench: Bench) -> Seen:
    """#13: one bit of the text flips, the file is cut, its index is cut."""
    run = _interrupted(bench, TWO)
    refused, named, details = 0, 0, ""
    damages: list[tuple[str, Callable[[Path], Any]]] = [
        ("tokens.bin", lambda file: os.truncate(file, file.stat().st_size // 2)),
        ("tokens.idx", lambda file: os.truncate(file, file.stat().st_size - 8)),
        ("tokens.idx", _flip),
    ]
    for name, damage in damages:
        file = bench.corpus / "train" / name
        whole = file.read_bytes()
        damage(file)
        try:
            outcome = bench.start(run)
        finally:
            file.write_bytes(whole)
        refused += outcome.code == EXIT_BAD_INPUT
        named += str(file.parent) in outcome.output
        details += outcome.output
    code = bench.start(run).code
    differ = read_trained(run).differ_from(bench.expected(TWO))
    return Seen(
        as_expected=refused == named == len(damages) and code == EXIT_DONE and not differ,
        words=f"{refused} of {len(damages)} refused, {named} named; whole again {differ} losses differ",
        details=details,
    )


def _interrupted(bench: Bench, layout: str) -> Run:
    """A run that was killed in step 7, with nobody to start it again."""
    run = bench.new_run(layout)
    outcome = bench.start(run, [{"point": "step.begin", "kind": "kill", "rank": 1, "step": 7}])
    if outcome.code in (EXIT_DONE, EXIT_STOPPED) or not outcome.happened:
        raise RuntimeError(f"the run was not killed but ended with {outcome.code}:\n{outcome.output}")
    return run


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    file.write_bytes(content)


STOPPING = (
    Row(
        name="kill",
        matrix="1",
        fault="SIGKILL of rank 2 of 4 in a forward pass",
        expected="started again, same bits",
        play=kill,
    ),
    Row(
        name="exception",
        matrix="1",
        fault="exception on rank 1 of 2 in a backward pass",
        expected="started again, same bits",
        play=exception,
    ),
    Row(
        name="save-kill",
        matrix="2",
        fault="SIGKILL at each moment of a save, each rank",
        expected="a good checkpoint always, same bits",
        play=kill_while_saving,
    ),
    Row(
        name="damaged-checkpoint",
        matrix="10",
        fault="newest checkpoint flipped, cut, missing, zeroed",
        expected="passed over with a warning, same bits",
        play=damaged_checkpoint,
    ),
    Row(
        name="damaged-corpus",
        matrix="13",
        fault="corpus cut, its index cut or flipped",
        expected="refused with the folder's name",
        play=damaged_corpus,
    ),
    Row(
        name="stops",
        matrix="14",
        fault="stopped and started again five times",
        expected="75 each time, no step lost, same bits",
        play=stop_five_times,
    ),
    Row(
        name="sigterm",
        matrix="15",
        fault="SIGTERM to a rank, then to the supervisor",
        expected="saved, 75, no step lost, same bits",
        play=sigterm,
    ),
    Row(
        name="settings",
        matrix="16",
        fault="another seed on resume",
        expected="refused with both values",
        play=other_settings,
    ),
    Row(
        name="layout",
        matrix="17",
        fault="saved by 2 ranks, gone on by 3 and by 4",
        expected="losses within 1e-5",
        play=other_layout,
    ),
)
