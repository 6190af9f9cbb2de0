"""The command ``k3train``: thin verbs. What a verb needs is imported when it runs."""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

from k3train.config.problems import REFUSALS, ConfigError, ConfigProblem, refusal

DONE, UNEXPECTED, BAD_INPUT, ENVIRONMENT, STOPPED = 0, 1, 2, 3, 75


def train(arguments: list[str]) -> int:
    """Compose, check and train on this machine, or go on with a run that stopped."""
    from k3train.config.compare import describe, settle
    from k3train.config.compose import compose

    options = _composing("train", train).parse_intermixed_args(arguments)
    run = compose(options.overrides, options.config_dir)
    if run.cluster.nodes > 1:
        rule, fix = "is more than this machine", "Start it with launch/slurm.py, or set cluster.nodes=1"
        raise ConfigError([ConfigProblem("cluster.nodes", run.cluster.nodes, rule, fix, "cluster.nodes")])
    from k3train.checkpoint.listing import last_trained
    from k3train.config.schema import Offload
    from k3train.data.preflight import check_data
    from k3train.data.same_text import check_text_on_disk
    from k3train.train.claim import claimed
    from k3train.train.launch import launch
    from k3train.train.machine import check_machine
    from k3train.train.preflight import check_run

    check_run(run)
    check_machine(run)
    if run.optim.offload is Offload.cpu:
        from k3train.optim.offload import host_adam

        print("optim.offload=cpu: loading DeepSpeed's CPU Adam, compiled at first use (minutes)", flush=True)
        host_adam()
    check_data(run)
    resolved = Path(run.dir) / "run.yaml"
    with claimed(run):  # rank 0 claims it again for as long as it trains
        trained = last_trained(resolved.parent)
        check_text_on_disk(run, trained)
        changes = settle(run, resolved, trained)
        for line in describe(changes):
            print(line, flush=True)
    if changes.all_trained:
        return DONE
    return launch(run, resolved)


def show(arguments: list[str]) -> int:
    """Print every setting with changes marked, the stages and the parameters; `show optim`: update rules."""
    from k3train.config.compose import compose, load_resolved
    from k3train.config.show import print_differences, print_tree, take_word
    from k3train.config.terminal import table_console
    from k3train.optim.memory import print_memory
    from k3train.plan.summary import print_parameters, print_splits, print_stages

    parser = _composing("show", show)
    parser.add_argument("--run", metavar="RUN", help="a run's folder or its run.yaml, instead of composing")
    parser.add_argument("--diff", action="store_true", help="only the differences")
    parser.add_argument(
        "--against", metavar="RUN", help="a run's folder or its run.yaml, in the place of the defaults"
    )
    options = parser.parse_intermixed_args(arguments)
    rules_only = take_word("optim", options.overrides)
    if options.run and options.overrides:
        given = options.overrides[0]
        parser.error(f"argument --run: a file is shown as it is, without {given}; leave one of them out")
    run = (
        load_resolved(_run_file(options.run))
        if options.run
        else compose(options.overrides, options.config_dir)
    )
    base = load_resolved(_run_file(options.against)) if options.against else compose([], options.config_dir)
    console = table_console()
    if rules_only:
        from k3train.optim.show import print_rules

        print_rules(run, console)
    elif options.diff:
        print_differences(run, base, options.against or "default", console)
    else:
        print_tree(run, base, console)
        print_stages(run, console)
        print_splits(run, console)
        print_memory(run, console)
        print_parameters(run, console)
    return DONE


def check(arguments: list[str]) -> int:
    """Say everything that is wrong with a configuration, or OK."""
    from k3train.config.compose import compose
    from k3train.plan.summary import one_line
    from k3train.train.preflight import check_run

    options = _composing("check", check).parse_intermixed_args(arguments)
    run = compose(options.overrides, options.config_dir)
    check_run(run)
    print("OK ", one_line(run))
    return DONE


def data(arguments: list[str]) -> int:
    """Build a corpus, verify one or show what is in one."""
    if arguments[:1] == ["build"]:
        return _build_corpus(arguments[1:])
    parser = _parser("data", data)
    parser.add_argument("action", choices=("build", "verify", "show"))
    parser.add_argument("what", help="build: the corpus, such as tiny; verify and show: its folder")
    options = parser.parse_args(arguments)
    from k3train.data.describe import described, verified

    print((verified if options.action == "verify" else described)(Path(options.what)))
    return DONE


def sample(arguments: list[str]) -> int:
    """Continue a prompt with a trained run."""
    parser = _parser("sample", sample)
    parser.add_argument("run_dir", type=Path, help="directory of the run")
    parser.add_argument("--prompt", required=True)
    parser.add_argument(
        "--tokens", type=int, help="tokens to write, up to the run's longest context (default 100)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 (the likeliest token), or 0.001 to 1000"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, help="instead of the run's newest; of the same model")
    options = parser.parse_args(arguments)
    if any("\ud800" <= letter <= "\udfff" for letter in options.prompt):
        parser.error("argument --prompt: is not UTF-8; give text")
    if options.tokens is not None and options.tokens < 0:
        parser.error(f"argument --tokens: {options.tokens} is negative; use 0 or more")
    if options.temperature != 0 and not 1e-3 <= options.temperature <= 1e3:
        parser.error(
            f"argument --temperature: {options.temperature} is out of range; use 0, or 0.001 to 1000"
        )
    if not 0 <= options.seed < 2**32:
        parser.error(f"argument --seed: {options.seed} is out of range; use 0 to {2**32 - 1}")
    from k3train.train.sample import sample as write

    how = {"prompt": options.prompt, "temperature": options.temperature, "seed": options.seed}
    print(write(options.run_dir, num_tokens=options.tokens, checkpoint=options.checkpoint, **how))
    return DONE


def convert(arguments: list[str]) -> int:
    """Write a checkpoint in the released Hugging Face layout, or a release as a checkpoint."""
    parser = _parser("convert", convert)
    actions = parser.add_subparsers(dest="action", required=True, metavar="export|import")
    out = actions.add_parser("export", help="from a run or a checkpoint to a folder of safetensors")
    out.add_argument(
        "source", type=Path, help="directory of a run, whose newest checkpoint is taken, or of one"
    )
    out.add_argument("out", type=Path, help="folder to make")
    out.add_argument("--layout", choices=("k3", "kimi_linear"), default="k3", help="default k3")
    out.add_argument(
        "--precision", choices=("bf16", "fp32"), default="bf16", help="of matrices (default bf16)"
    )
    out.add_argument("--like-release", action="store_true", help="router, norms and depth mixes in bf16 too")
    out.add_argument("--vision-from", type=Path, metavar="DIR", help="release whose image encoder is copied")
    out.add_argument("--shard-gb", type=float, default=5, help="largest shard in GB (default 5)")
    back = actions.add_parser("import", help="from a folder of safetensors to a checkpoint")
    back.add_argument("source", type=Path, help="folder with config.json and safetensors")
    back.add_argument("out", type=Path, help="checkpoint folder to make, for checkpoint.load_from")
    back.add_argument("--text-only", action="store_true", help="leave the image encoder out")
    back.add_argument("--precision", choices=("bf16", "fp32"), help="instead of the one in config.json")
    options = parser.parse_args(arguments)
    if options.action == "export" and not 0 < options.shard_gb < 1e6:
        out.error(f"argument --shard-gb: {options.shard_gb} is no size of a file; use more than 0")
    from k3train.backend.start import start_backend
    from k3train.config.schema import Device

    start_backend(Device.cpu)
    from k3train.checkpoint.hf import command

    print(command.export(options) if options.action == "export" else command.bring_in(options))
    return DONE


def balance(arguments: list[str]) -> int:
    """Print how evenly a run's experts were loaded, layer by layer, and replay its saved histograms."""
    parser = _parser("balance", balance)
    parser.add_argument("run_dir", type=Path, help="directory of the run")
    parser.add_argument("--last", type=int, default=100, help="recorded steps to average (default 100)")
    parser.add_argument("--bins", type=int, help="merge saved histograms to so many bins and compare")
    options = parser.parse_args(arguments)
    if options.last < 1:
        parser.error(f"argument --last: {options.last} is no number of steps; use 1 or more")
    if options.bins is not None and options.bins < 2:
        parser.error(f"argument --bins: {options.bins} is no number of bins; use 2 or more")
    from k3train.config.terminal import table_console
    from k3train.monitor.replay import print_balance

    print_balance(options.run_dir, table_console(), last=options.last, bins=options.bins)
    return DONE


def drill(arguments: list[str]) -> int:
    """Break small runs on purpose on this machine's CPU and check that each recovers as promised."""
    from k3train.drill.command import drill as run

    return run(_parser("drill", drill), arguments)


def bench(arguments: list[str]) -> int:
    """Time kernels and the whole model against peers on this machine; `bench kda --audit`: their numbers."""
    from k3train.bench.command import bench as run

    return run(_parser("bench", bench), arguments)


VERBS: dict[str, Callable[[list[str]], int]] = {
    v.__name__: v for v in (train, show, check, data, sample, balance, convert, drill, bench)
}


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; returns 0 done, 1 unexpected or interrupted, 2 bad input, 3 environment, 75 stopped and
    resumable."""
    try:
        return _main(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        print("interrupted; the same command starts over", file=sys.stderr)
        return UNEXPECTED


def _main(given: list[str]) -> int:
    lines = "\n".join(f"  {name:8}{verb.__doc__}" for name, verb in VERBS.items())
    parser = argparse.ArgumentParser(prog="k3train", description=f"verbs:\n{lines}")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("verb", choices=VERBS, metavar="verb", help="see 'k3train VERB --help'")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without Unicode still shows the rest
    from k3train.config.secrets import redacted_output

    with redacted_output():
        return _run(VERBS[parser.parse_args(given[:1]).verb], given[1:])


def _run(verb: Callable[[list[str]], int], arguments: list[str]) -> int:
    try:
        code = verb(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return UNEXPECTED
    except REFUSALS as error:
        sentence, code = refusal(error)
        print(sentence, file=sys.stderr)
        return code
    except KeyboardInterrupt:
        if verb is not train:
            raise
        print("interrupted before training; the same command goes on", file=sys.stderr)
        return STOPPED
    return code


def _parser(name: str, verb: Callable[[list[str]], int]) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"k3train {name}", description=verb.__doc__)


def _composing(name: str, verb: Callable[[list[str]], int]) -> argparse.ArgumentParser:
    parser = _parser(name, verb)
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="such as experiment=k3 optim.beta2=0.99"
    )
    parser.add_argument("--config-dir", help="folder of the configuration files")
    return parser


def _run_file(given: str) -> Path:
    path = Path(given)
    return path / "run.yaml" if path.is_dir() else path


def _build_corpus(arguments: list[str]) -> int:
    """Run the checkout's data/build.py, which is no part of the installed package."""
    program = Path(__file__).resolve().parents[1] / "data" / "build.py"
    if not program.is_file():
        print(f"building a corpus needs a k3train checkout: {program} is not there", file=sys.stderr)
        return ENVIRONMENT
    sys.path.insert(0, str(program.parent))  # where its own modules lie
    spec = importlib.util.spec_from_file_location("k3train_build_corpus", program)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
