"""From files and overrides to one typed, checked Run, and from a Run to its resolved file and back.

Hydra composes the groups; ``build`` types the result. The schema's defaults are registered with Hydra as
``run_schema`` and come first in configs/run.yaml, so every key exists before any file is merged. They are
registered as plain data: Hydra stops at the first wrong type or key, and here all are reported together.

Ranks never compose. The launcher composes once and writes the resolved file; ranks read that file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import Container, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from k3train.config.build import Builder, to_plain
from k3train.config.composing import why_not_composed, why_not_resolved
from k3train.config.defaults import composition
from k3train.config.durable import naming, sync_folder
from k3train.config.experiment import experiment_problems
from k3train.config.files import read_mapping, unsafe_content
from k3train.config.origin import file_of
from k3train.config.overrides import Overrides, read_overrides
from k3train.config.problems import ConfigError, ConfigProblem
from k3train.config.rules import check, concerns
from k3train.config.schema import Run

CONFIG_NAME = "run"
"""configs/run.yaml is where composition starts."""
SCHEMA_NAME = "run_schema"
CONFIG_DIR_VARIABLE = "K3TRAIN_CONFIGS"

_CHECKOUT_CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def compose(overrides: list[str], config_dir: str | Path | None = None) -> Run:
    """Compose configs/run.yaml with the overrides. Writes no files and changes no directory.

    Raises ConfigError with every problem: of the overrides, the files, the types and the rules.
    """
    directory = find_config_dir(config_dir)
    sorted_in = read_overrides(overrides, directory)
    problems = list(sorted_in.problems)
    of_files = [problem for path in sorted(directory.rglob("*.yaml")) for problem in unsafe_content(path)]
    files = [directory / f"{CONFIG_NAME}.yaml"]
    if not of_files:
        found = composition(directory, CONFIG_NAME, sorted_in.accepted)
        files, of_files = found.files, found.problems
        of_files += [problem for file in files for problem in experiment_problems(file)]
    if of_files:
        raise ConfigError([*problems, *of_files])
    config = _composed(directory, sorted_in, files)
    try:
        tree = cast(object, OmegaConf.to_container(config, resolve=True))
    except (OmegaConfBaseException, RecursionError) as error:
        problem = why_not_resolved(error, cast(object, OmegaConf.to_container(config)))
        raise ConfigError([*problems, _with_file(problem, directory, sorted_in.accepted)]) from None
    builder = Builder()
    run = builder.build(tree)
    problems += [_with_file(problem, directory, sorted_in.accepted) for problem in builder.problems]
    problems += check(run, wrong_keys=frozenset(builder.wrong_keys | sorted_in.wrong_keys))
    if problems:
        raise ConfigError(problems)
    return run


def find_config_dir(config_dir: str | Path | None = None) -> Path:
    """Absolute folder of the configuration: ``config_dir``, else $K3TRAIN_CONFIGS, else the checkout's.

    Raises ConfigError when there is none.
    """
    named = config_dir or os.environ.get(CONFIG_DIR_VARIABLE)
    directory = Path(named or _CHECKOUT_CONFIGS).expanduser().absolute()
    if (directory / f"{CONFIG_NAME}.yaml").is_file():
        return directory
    if named:
        rule = f"the configuration folder {directory} has no {CONFIG_NAME}.yaml"
        fix = "Give the configs folder of a k3train checkout"
    else:
        rule = "this k3train was installed without a checkout and so without its configs folder"
        fix = f"Give one with --config-dir or in {CONFIG_DIR_VARIABLE}"
    raise ConfigError([ConfigProblem("", str(directory), rule, fix, "config.no-folder")])


def save_resolved(run: Run, path: str | Path) -> None:
    """Write the whole Run as YAML, whole or not at all.

    Raises FileExistsError when the file is there and holds another Run; the same Run is left alone.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _written_beside(run, target) as partial:
        try:
            os.link(partial, target)
        except FileExistsError:
            if load_resolved(target) != run:
                raise
    sync_folder(target.parent)


def replace_resolved(run: Run, path: str | Path, *, first: Callable[[], object] = lambda: None) -> None:
    """Write the whole Run as YAML in the place of an older file, whole or not at all.

    ``first`` is called when the new file is on the disk and not yet in its place; when it raises, the older
    one stays. Raises OSError with the file's name.
    """
    target = Path(path)
    with _written_beside(run, target) as partial:
        first()
        os.replace(partial, target)
    sync_folder(target.parent)


def load_resolved(path: str | Path) -> Run:
    """Read a resolved file as strictly as the command line. Raises ConfigError with the file and every
    problem."""
    file, again = Path(path), "start its run again with the settings that it had"
    tree, problems = read_mapping(file)
    if not tree and not problems:
        problems = [
            ConfigProblem("", str(path), f"{path} is empty", f"Remove it, and {again}", "config.file")
        ]
    elif file.is_file() or (file.is_dir() and file.name == f"{CONFIG_NAME}.yaml"):
        problems = [replace(each, fix=f"{each.fix}, or remove it, and {again}") for each in problems]
    if problems:
        raise ConfigError(problems, str(path))
    builder = Builder()
    run = builder.build(tree)
    problems = builder.problems + check(run, wrong_keys=frozenset(builder.wrong_keys))
    if problems:
        raise ConfigError(problems, str(path))
    return run


def to_yaml(run: Run) -> str:
    """The whole Run as YAML, in the order of the schema."""
    return yaml.safe_dump(to_plain(run), sort_keys=False, allow_unicode=True)


def _composed(directory: Path, overrides: Overrides, files: list[Path]) -> Container:
    """Everything that the files and overrides say, references as they are written."""
    ConfigStore.instance().store(name=SCHEMA_NAME, node=to_plain(Run()))
    try:
        with initialize_config_dir(str(directory), version_base="1.3"):
            return hydra_compose(CONFIG_NAME, overrides=overrides.accepted)
    except Exception as error:  # Hydra has no common one: ValueError and AssertionError are among its own
        problems = why_not_composed(error, directory, files)
        raise ConfigError([*overrides.problems, *problems]) from error


def _with_file(problem: ConfigProblem, directory: Path, overrides: list[str]) -> ConfigProblem:
    """The same problem naming the file that holds the value, when a file does and no override."""
    overridden = {text.removeprefix("++").partition("=")[0] for text in overrides if text.startswith("++")}
    if not problem.key or concerns(problem, overridden):
        return problem
    selections = [text for text in overrides if not text.startswith("++")]
    file = file_of(problem.key, directory, CONFIG_NAME, selections)
    return replace(problem, rule=f"(set in {file}) {problem.rule}") if file else problem


@contextmanager
def _written_beside(run: Run, target: Path) -> Generator[Path]:
    """The resolved file under another name beside ``target``, gone again in the end."""
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with naming(target), partial.open("w", encoding="utf-8") as file:
            file.write(to_yaml(run))
            file.flush()
            os.fsync(file.fileno())
        yield partial
    finally:
        partial.unlink(missing_ok=True)
