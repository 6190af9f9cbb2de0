"""The documents are executed: cheap command blocks run, all others are composed, and every path exists."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from k3train.__main__ import VERBS
from k3train.config.compose import compose
from tests.docs.pages import ROOT, Block, blocks, commands, documents, links, named_paths, tree_paths

SHELLS = ("bash", "sh", "console")
BASH = [block for file in documents() for block in blocks(file) if block.language in SHELLS]
ids = {"ids": lambda value: value.name if isinstance(value, Block) else str(value.relative_to(ROOT))}


@pytest.mark.parametrize("block", [block for block in BASH if block.not_run is None], **ids)
def test_a_command_block_runs(block: Block, tmp_path: Path) -> None:
    """From the checkout, as typed; k3train and python are the environment's."""
    for name, line in (("k3train", '-m k3train "$@"'), ("python", '"$@"')):
        (tmp_path / name).write_text(f'#!/bin/bash\nexec "{sys.executable}" {line}\n')
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=ROOT,
        env=environment,
        text=True,
        capture_output=True,
        timeout=200,
    )
    assert result.returncode == 0, f"{block.name}\n{result.stdout}{result.stderr}"


@pytest.mark.parametrize("block", BASH, **ids)
def test_every_command_of_ours_exists_and_its_settings_compose(block: Block) -> None:
    for words in commands(block):
        program, rest = words[0], words[1:]
        if program == "python" and rest and rest[0].endswith(".py"):
            program, rest = rest[0], rest[1:]
        if program == "k3train":
            assert rest[0] in VERBS, f"{block.name}: k3train {rest[0]}"
        if "/" in program and not program.startswith(("/", "~")):
            assert (ROOT / program).is_file() or program.startswith(".venv"), f"{block.name}: {program}"
        composes = program == "k3train" and rest[0] in ("train", "show", "check")
        if composes or program in ("launch/slurm.py", "launch/quickstart.sh", "launch/summary.py"):
            settings = [word for word in rest if "=" in word and not word.startswith("-")]
            compose(settings)


EXPERIMENTS = [
    block
    for file in documents()
    for block in blocks(file)
    if block.language == "yaml" and block.text.startswith("# @package _global_")
]


def test_documents_show_experiments() -> None:
    assert EXPERIMENTS


@pytest.mark.parametrize("block", EXPERIMENTS, **ids)
def test_an_experiment_s_file_composes(block: Block, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "configs" / "experiment" / "shown.yaml").write_text(block.text)
    compose(["experiment=shown"], tmp_path / "configs")


def test_every_reason_not_to_run_is_in_front_of_a_command_block() -> None:
    for file in documents():
        reasons = file.read_text(encoding="utf-8").count("<!-- not run:")
        assert reasons == sum(block.not_run is not None for block in BASH if block.file == file), file


@pytest.mark.parametrize("file", documents(), **ids)
def test_every_path_and_link_exists(file: Path) -> None:
    bases = (ROOT, file.parent)
    missing = [path for path in named_paths(file) if not any((base / path).exists() for base in bases)]
    missing += [target for target in links(file) if not (file.parent / target).exists()]
    assert missing == []


def test_the_readme_s_file_tree_is_the_checkout_s() -> None:
    (tree,) = (block for block in blocks(ROOT / "README.md") if block.language == "tree")
    shown = set(tree_paths(tree))
    assert {path for path in shown if not (ROOT / path).exists()} == set()
    packages = {f"k3train/{path.parent.name}/" for path in ROOT.glob("k3train/*/__init__.py")}
    assert packages <= shown


def test_the_checks_find_what_they_look_for(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "See `k3train/nowhere.py` and `run.yaml`, [this](gone.md) and [that](https://example.com).\n\n"
        "<!-- not run: because -->\n```bash\nk3train fly \\\n  a=1 # why\n```\n```bash\ntrue\n```\n"
        "```tree\na/   x\n  b/  y\n    c.py\nd/\n```\n"
    )
    fly, true, tree = blocks(page)
    assert (fly.not_run, true.not_run) == ("because", None)
    assert commands(fly) == [["k3train", "fly", "a=1"]]
    assert tree_paths(tree) == ["a/", "a/b/", "a/b/c.py", "d/"]
    assert named_paths(page) == {"k3train/nowhere.py"}
    assert links(page) == {"gone.md"}
