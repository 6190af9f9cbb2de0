"""Renders the Slurm job of a run; prints it, or submits it with --submit.

    python launch/slurm.py experiment=debug cluster.nodes=2 cluster.ranks_per_node=8 --submit

The run is composed and checked here, on the login node. With --submit the resolved configuration and the job
script are written to the run's folder, and the job reads them from there, as does every restart of it.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path
from shlex import quote

from k3train.checkpoint.listing import last_trained
from k3train.config.compare import describe, settle
from k3train.config.compose import compose
from k3train.config.problems import REFUSALS, ConfigError, ConfigProblem, Unavailable, refusal
from k3train.config.schema import Cluster, Device, Run
from k3train.config.secrets import HIDDEN, redact
from k3train.train.claim import claimed
from k3train.train.preflight import check_run

TEMPLATE = Path(__file__).with_name("slurm.sbatch")
NODE = Path(__file__).with_name("node.py")
RESOLVED = "run.yaml"
JOB = "job.sbatch"
PLAIN = re.compile(r"[\w.,:/=@+%\[\]() -]*")
"""What may stand in an #SBATCH line: no quotes, no line breaks, nothing that a shell acts on."""

LONGEST_GRACE_SECONDS = 65535
"""What sbatch's --signal takes."""


def render(run: Run, *, grace_seconds: int, extra: list[str], python: str, folder: Path) -> str:
    """Text of the job script. ``folder`` is the job's working directory, where relative data paths start.

    ``grace_seconds`` before the time limit Slurm signals the script, which asks the ranks to save and stop.
    ``extra`` are further sbatch options, such as ``--exclusive``. Raises ConfigError for names that an sbatch
    line cannot hold, and for a grace that the time limit has no room for.
    """
    run_dir = folder / run.dir
    _refuse_odd_names(run, folder, extra)
    _refuse_odd_grace(run.cluster, grace_seconds)
    values = {
        "directives": "\n".join(
            f"#SBATCH {option}" for option in _options(run, run_dir, folder, grace_seconds, extra)
        ),
        "name": run.name,
        "run_dir": quote(str(run_dir)),
        "python": quote(python),
        "node_program": quote(str(NODE)),
        "threads": str(run.cluster.threads_per_rank),
        "ranks": str(run.cluster.ranks_per_node),
        "resolved": RESOLVED,
        "srun_options": "--wait=0 --no-kill" if _may_lose_nodes(run.cluster) else "--wait=60",
        "policy": f"--min-nodes {run.cluster.min_nodes or run.cluster.nodes} "
        f"--max-restarts {run.cluster.max_restarts} --restart-delay {run.cluster.restart_delay_seconds:g}",
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda field: values[field[1]], TEMPLATE.read_text())


def tell_device(run: Run) -> None:
    """Say on stderr that a job asks for GPUs only because the settings leave the device open."""
    if run.device is Device.auto:
        gpus = run.cluster.ranks_per_node
        print(
            f"device = auto: what the nodes have is not known here, so the job asks for {gpus} GPUs a node; "
            "set device=cpu for nodes without, or device=cuda",
            file=sys.stderr,
        )


def _options(run: Run, run_dir: Path, folder: Path, grace_seconds: int, extra: list[str]) -> list[str]:
    cluster = run.cluster
    log = str(run_dir).replace("%", "%%")
    options = [
        f'--job-name="{run.name}"',
        f"--nodes={cluster.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={_cores(cluster)}",
        f'--chdir="{folder}"',
        f'--output="{log}/slurm-%j.out"',
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{grace_seconds}",
    ]
    if _may_lose_nodes(cluster):
        options.append("--no-kill")
    if run.device is not Device.cpu:
        options.insert(4, f"--gpus-per-node={cluster.ranks_per_node}")
    if cluster.partition:
        options.append(f"--partition={cluster.partition}")
    if cluster.account:
        options.append(f"--account={cluster.account}")
    if cluster.time_limit_minutes:
        options.append(f"--time={cluster.time_limit_minutes}")
    return [*options, *extra]


def _cores(cluster: Cluster) -> int:
    """Cores of one node's task: every rank's compute threads, and one a rank for assembling batches."""
    return cluster.ranks_per_node * (cluster.threads_per_rank + 1)


def _may_lose_nodes(cluster: Cluster) -> bool:
    """Whether the job is to outlive some of its nodes."""
    return 0 < cluster.min_nodes < cluster.nodes


def _refuse_odd_names(run: Run, folder: Path, extra: list[str]) -> None:
    named = {
        "name": run.name,
        "dir": run.dir,
        "cluster.partition": run.cluster.partition,
        "cluster.account": run.cluster.account,
        "": str(folder),
    }
    texts = [*named.items(), *(("--sbatch", text) for text in extra)]
    rule = "cannot stand in an #SBATCH line"
    fix = "Use letters, digits, spaces and .,:/=@+%[]()-_ only"
    problems = [
        ConfigProblem(key, text, rule if key else f"the folder {text!r} {rule}", fix, "slurm.name")
        for key, text in texts
        if not PLAIN.fullmatch(text)
    ]
    rule, fix = "holds a password or key, and the job script is kept on the disk", "Export it before sbatch"
    problems += [
        ConfigProblem("--sbatch", HIDDEN, rule, fix, "slurm.secret") for text in extra if redact(text) != text
    ]
    if problems:
        raise ConfigError(problems)


def _refuse_odd_grace(cluster: Cluster, seconds: int) -> None:
    limit = 60 * cluster.time_limit_minutes
    if not 1 <= seconds <= LONGEST_GRACE_SECONDS:
        rule = "is no time that Slurm can signal before the limit"
        fix = f"Use 1 to {LONGEST_GRACE_SECONDS:,} seconds"
    elif limit and seconds >= limit:
        rule = f"leaves no time to train before cluster.time_limit_minutes = {cluster.time_limit_minutes}"
        fix = f"Use less than {limit:,} seconds, or a longer limit"
    else:
        return
    raise ConfigError([ConfigProblem("--grace-seconds", seconds, rule, fix, "slurm.grace")])


def submit(run: Run, script: str) -> int:
    """Write the resolved run and the job script to the run's folder and hand the script to sbatch.

    Raises BadInput when the folder is in use or holds another run, and Unavailable without sbatch or when the
    folder cannot be written.
    """
    if shutil.which("sbatch") is None:
        raise Unavailable(
            "sbatch is not on this machine: submit where Slurm is, or leave --submit out to see the job"
        )
    run_dir = Path(run.dir).absolute()
    job = run_dir / JOB
    with claimed(run):  # until the job can start, whose rank 0 claims it for as long as it trains
        changes = settle(run, run_dir / RESOLVED, last_trained(run_dir))
        for line in describe(changes):
            print(line)
        if changes.all_trained:
            return 0
        job.write_text(script)
    return subprocess.run(["sbatch", str(job)], check=False).returncode


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of a job, which a sweep has too."""
    parser.add_argument("--config-dir", help="folder of the configuration")
    parser.add_argument(
        "--grace-seconds", type=int, default=300, help="time to save and stop before the time limit"
    )
    parser.add_argument(
        "--sbatch", action="append", default=[], metavar="OPTION", help="one more sbatch option"
    )


def main(arguments: list[str]) -> int:
    """Compose, check and render; print or submit. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for k3train train")
    parser.add_argument("--submit", action="store_true", help="submit the job instead of printing it")
    add_options(parser)
    options = parser.parse_intermixed_args(arguments)
    folder = Path.cwd()
    try:
        run = compose(options.overrides, options.config_dir)
        check_run(run)
        tell_device(run)
        script = render(
            run,
            grace_seconds=options.grace_seconds,
            extra=options.sbatch,
            python=sys.executable,
            folder=folder,
        )
        if options.submit:
            return submit(run, script)
    except REFUSALS as error:
        sentence, code = refusal(error)
        print(sentence, file=sys.stderr)
        return code
    print(script, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
