"""Runs or submits one run for every combination of comma-separated values.

    python launch/sweep.py experiment=debug optim.weight_decay=0.05,0.1 seed=1,2

Each point is a run of its own: own folder <dir>-sweep/<point>, own processes, own checkpoints. Points run one
after another on this machine, or --jobs at a time, or with --slurm as one job each. The same command again
goes on where it was.
Commas in quotes, brackets and braces belong to the value.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import slurm

from k3train.config.compose import compose
from k3train.config.keys import ANY_NAME, flattened
from k3train.config.overrides import GROUPS
from k3train.config.problems import REFUSALS, ConfigError, ConfigProblem, refusal, shown
from k3train.config.schema import Device, Run
from k3train.train.claim import cannot_write
from k3train.train.preflight import check_run

STOPPED = 75


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run of the sweep."""

    name: str
    """What distinguishes it, as a folder name."""
    overrides: list[str]
    """All its overrides, with its own name and dir."""
    run: Run


def split_values(text: str) -> list[str]:
    """``text`` at its commas, save those in quotes, brackets or braces."""
    values, start, depth, quote = [], 0, 0, ""
    for position, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            values.append(text[start:position])
            start = position + 1
    return [*values, text[start:]]


def combinations(overrides: list[str]) -> list[tuple[list[str], list[tuple[str, str]]]]:
    """Every combination of values, the last key fastest: (overrides, the varied ones as (key, value)).

    Raises ConfigError where there is nothing between two commas, or the same twice.
    """
    choices = []
    for override in overrides:
        key, equals, values = override.partition("=")
        several = [value.strip() for value in split_values(values)]
        if len(several) > 1:
            _refuse_odd_values(override, several)
        choices.append([(key, equals, value) for value in several])
    varied = [len(choice) > 1 for choice in choices]
    return [
        (
            [key + equals + value for key, equals, value in point],
            [(key, value) for (key, _, value), varies in zip(point, varied, strict=True) if varies],
        )
        for point in itertools.product(*choices)
    ]


def _refuse_odd_values(override: str, values: list[str]) -> None:
    twice = next((value for value in values if values.count(value) > 1), "")
    if "" in values:
        rule, fix = (
            f"'{shown(override)}' has a comma with no value beside it",
            "Leave the comma out, or write ''",
        )
    elif twice:
        rule = f"'{shown(override)}' gives {shown(twice)} twice, and both would be the same run"
        fix = "Leave one out"
    else:
        return
    raise ConfigError([ConfigProblem("", override, rule, fix, "sweep.values")])


def point_name(varied: list[tuple[str, str]]) -> str:
    """Folder name of a point: its varied keys, shortened, and values. The same in every sweep."""
    full = "_".join(f"{short_key(key)}-{value}" for key, value in varied)
    plain = re.sub(r"[^\w.+-]", "-", full)
    if plain == full and len(plain) <= 100:
        return plain
    # Different values may look alike once they are plain.
    return f"{plain[:90]}-{hashlib.sha256(full.encode()).hexdigest()[:8]}"


def short_key(key: str) -> str:
    """The shortest end of ``key`` that no other setting of the schema has: a sweep over another key must not
    find these folders. A name that the user chose, such as a stage's, and what it is a name of, stay in it.

    The whole key where it is a group of files, or no setting of its own.
    """
    parts = key.lstrip("+").split(".")
    ends = [pattern.split(".") for pattern in (*flattened(), *GROUPS)]
    own = next((end for end in ends if _fits(end, parts)), None)
    if own is None:
        return key
    first = own.index(ANY_NAME) - 1 if ANY_NAME in own else len(own) - 1
    starts = range(first, -1, -1)
    start = next((at for at in starts if sum(end[at - len(own) :] == own[at:] for end in ends) == 1), 0)
    return ".".join(parts[start:])


def _fits(pattern: list[str], parts: list[str]) -> bool:
    return len(pattern) == len(parts) and all(
        each in (part, ANY_NAME) for each, part in zip(pattern, parts, strict=True)
    )


def points(overrides: list[str], config_dir: str | None) -> list[Point]:
    """Compose and check every point. Raises ConfigError with the problems of the first that has any."""
    found = []
    for settings, varied in combinations(overrides):
        base = compose(settings, config_dir)
        name = point_name(varied) if varied else "only"
        own = [f"name={base.name}-sweep/{name}", f"dir={base.dir}-sweep/{name}"]
        kept = [setting for setting in settings if setting.partition("=")[0] not in ("name", "dir")]
        run = compose([*kept, *own], config_dir)
        check_run(run)
        found.append(Point(name=name, overrides=[*kept, *own], run=run))
    return found


def run_here(sweep: list[Point], config_dir: str | None, jobs: int) -> int:
    """Train the points, ``jobs`` at a time; a point that fails does not keep the others from running."""
    codes: dict[str, int] = {}
    running: dict[str, subprocess.Popen[bytes]] = {}

    def forward(number: int, frame: FrameType | None) -> None:
        for process in running.values():
            process.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        waiting = list(enumerate(sweep, 1))
        while running or (waiting and STOPPED not in codes.values()):
            while waiting and len(running) < jobs and STOPPED not in codes.values():
                number, point = waiting.pop(0)
                output = Path(f"{point.run.dir}.log") if jobs > 1 else None
                print(f"== {number}/{len(sweep)} {point.name} in {output or point.run.dir}", flush=True)
                try:
                    running[point.name] = start(point, config_dir, output)
                except OSError as error:
                    sentence, codes[point.name] = refusal(cannot_write(point.run, error))
                    print(sentence, file=sys.stderr)
            codes.update(ended(running) if running else {})
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if STOPPED in codes.values():
        print("stopped; the same command again goes on here")
        return STOPPED
    print("== summary")
    for point in sweep:
        code = codes[point.name]
        print(f"{'done' if code == 0 else f'failed with code {code}':>20}  {point.run.dir}")
    print(look(sweep))
    return max(codes.values())


def look(sweep: list[Point]) -> str:
    """What to type next."""
    return f"what a run has reached: python launch/summary.py {shlex.quote(sweep[0].run.dir)}"


def start(point: Point, config_dir: str | None, output: Path | None) -> subprocess.Popen[bytes]:
    """Train in a session of its own, so that a signal reaches it once, from here; prints into ``output``."""
    more = ["--config-dir", config_dir] if config_dir else []
    command = [sys.executable, "-m", "k3train", "train", *point.overrides, *more]
    if output is None:
        return subprocess.Popen(command, start_new_session=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("ab") as log:
        return subprocess.Popen(command, start_new_session=True, stdout=log, stderr=subprocess.STDOUT)


def ended(running: dict[str, subprocess.Popen[bytes]]) -> dict[str, int]:
    """Wait until at least one process has ended, take those out of ``running`` and return their codes."""
    while True:
        codes = {name: code for name, process in running.items() if (code := process.poll()) is not None}
        if codes:
            for name in codes:
                del running[name]
            return {name: code if code >= 0 else 128 - code for name, code in codes.items()}
        time.sleep(0.1)


def submit(sweep: list[Point], options: argparse.Namespace) -> int:
    """Print or submit one Slurm job per point; stops at the first that cannot be submitted."""
    folder = Path.cwd()
    slurm.tell_device(next((p.run for p in sweep if p.run.device is Device.auto), sweep[0].run))
    for point in sweep:
        script = slurm.render(
            point.run,
            grace_seconds=options.grace_seconds,
            extra=options.sbatch,
            python=sys.executable,
            folder=folder,
        )
        if not options.submit:
            print(script)
        elif code := slurm.submit(point.run, script):
            return code
    if options.submit:
        print(look(sweep))
    return 0


def main(arguments: list[str]) -> int:
    """Compose and check all points, then run, print or submit them. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="+", metavar="key=value[,value...]")
    parser.add_argument("--list", action="store_true", help="print the points and their folders only")
    parser.add_argument(
        "--jobs", type=int, default=1, help="points at a time on this machine; each then prints to <dir>.log"
    )
    parser.add_argument("--slurm", action="store_true", help="print one Slurm job per point")
    parser.add_argument("--submit", action="store_true", help="with --slurm: submit them")
    slurm.add_options(parser)
    options = parser.parse_intermixed_args(arguments)
    if options.submit and not options.slurm:
        parser.error("--submit needs --slurm")
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: at least 1 point at a time")
    if options.slurm and options.jobs > 1:
        parser.error("--jobs is for this machine; with --slurm the queue decides")
    try:
        sweep = points(options.overrides, options.config_dir)
        if options.list:
            print("\n".join(f"{point.run.dir}  {' '.join(point.overrides)}" for point in sweep))
            return 0
        return submit(sweep, options) if options.slurm else run_here(sweep, options.config_dir, options.jobs)
    except REFUSALS as error:
        sentence, code = refusal(error)
        print(sentence, file=sys.stderr)
        return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
