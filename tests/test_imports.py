"""Imports point down, and what must stay free of torch does: contracts that are run, and shown to bite."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import PATIENCE

ROOT = Path(__file__).parents[1]
PROGRAMS = ("configs", "data", "launch")
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the checkout at ``root``: it looks for packages there first."""
    return subprocess.run(
        [sys.executable, "-c", LINT, "--no-cache"], cwd=root, text=True, capture_output=True, timeout=PATIENCE
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "k3train", tmp_path / "k3train", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_every_contract_is_kept() -> None:
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("file", "line", "importer", "imported"),
    [
        ("config/schema.py", "import k3train.train", "config", "k3train.train"),
        ("data/__init__.py", "import k3train.optim", "data", "k3train.optim"),
        (
            "kernels/packing.py",
            "import k3train.model",
            "kernels",
            "k3train.model",
        ),
        ("curriculum/stages.py", "import torch", "curriculum", "torch"),
        (
            "parallel/layout.py",
            "import megatron.core",
            "parallel.layout",
            "megatron",
        ),
    ],
)
def test_a_bad_import_breaks_a_contract(
    copy: Path, file: str, line: str, importer: str, imported: str
) -> None:
    with open(copy / "k3train" / file, "a") as module:
        module.write(f"\n{line}\n")
    result = lint(copy)
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"k3train.{importer} is not allowed to import {imported}" in result.stdout


def test_a_new_package_without_a_layer_breaks_a_contract(copy: Path) -> None:
    (copy / "k3train" / "attic").mkdir()
    (copy / "k3train" / "attic" / "__init__.py").touch()
    result = lint(copy)
    assert result.returncode == 1
    assert "k3train.attic" in result.stdout + result.stderr


def imports(tree: ast.AST) -> Iterator[str]:
    """Full names of what ``tree`` imports: module, and module.name for ``from module import name``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_level(tree: ast.Module) -> ast.Module:
    """The statements that run when the module is imported: all but those inside functions."""

    class DropFunctions(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

    return DropFunctions().visit(tree)


def python_files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def below(name: str, roots: tuple[str, ...]) -> bool:
    return any(name == root or name.startswith(root + ".") for root in roots)


def test_launchers_import_only_what_needs_no_torch() -> None:
    allowed = ("k3train.config", "k3train.curriculum", "k3train.parallel.layout", "k3train.plan")
    allowed += ("k3train.train.preflight", "k3train.checkpoint.listing", "k3train.monitor.metrics_file")
    allowed += ("k3train.train.claim",)
    on_nodes = ("k3train.train.supervisor",)  # node.py starts ranks, which need torch anyway
    bad = [
        (file.name, name)
        for file in python_files("launch")
        for name in imports(ast.parse(file.read_text()))
        if below(name, ("k3train", "megatron"))
        and not below(name, allowed + (on_nodes if file.name == "node.py" else ()))
    ]
    assert bad == []


def test_launchers_load_no_torch() -> None:
    """Nor does what they import, however far down."""
    program = "import sys, slurm, summary, sweep; print('torch' in sys.modules, 'numpy' in sys.modules)"
    path = os.pathsep.join([str(ROOT), str(ROOT / "launch")])
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": path}, text=True, capture_output=True
    )
    assert done.stdout == "False False\n", done.stderr


def test_only_the_group_module_touches_megatron_s_global_groups() -> None:
    users = {
        file.relative_to(ROOT).as_posix()
        for file in python_files("k3train")
        if any(below(n, ("megatron.core.parallel_state",)) for n in imports(ast.parse(file.read_text())))
    }
    assert users == {"k3train/parallel/groups.py"}


def test_optional_packages_are_imported_only_where_they_are_used() -> None:
    optional = ("transformer_engine", "apex", "triton", "fla", "wandb", "tensorboard", "deepspeed")
    bad = [
        (file.relative_to(ROOT).as_posix(), name)
        for file in [*python_files("k3train"), *python_files("launch")]
        for name in imports(module_level(ast.parse(file.read_text())))
        if below(name, optional) and not (name.split(".")[0] == "triton" and is_kernel_file(file.stem))
    ]
    assert bad == []


def test_kernel_files_are_imported_inside_functions() -> None:
    """A file that imports Triton at its top is imported inside functions, save by another such file."""
    at_top = {
        file: list(imports(module_level(ast.parse(file.read_text())))) for file in python_files("k3train")
    }
    kernels = {file.stem for file, names in at_top.items() if any(below(n, ("triton",)) for n in names)}
    assert kernels
    bad = [
        (file.relative_to(ROOT).as_posix(), name)
        for file, names in at_top.items()
        if file.stem not in kernels
        for name in names
        if kernels & set(name.split("."))
    ]
    assert bad == []


def is_kernel_file(stem: str) -> bool:
    return stem.startswith("triton_")


def test_package_markers_are_empty_and_program_folders_are_no_packages() -> None:
    assert [file for file in python_files("k3train") if file.name == "__init__.py" and file.read_text()] == []
    assert [folder for folder in PROGRAMS if (ROOT / folder / "__init__.py").exists()] == []
