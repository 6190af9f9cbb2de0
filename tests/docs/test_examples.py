"""The parts in models that are not k3train's: each example of docs/examples runs and learns."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.ranks import run_ranks

EXAMPLES = sorted((Path(__file__).parents[2] / "docs" / "examples").glob("*.py"))


def run_example(rank: int, path: Path) -> list[float]:
    return runpy.run_path(str(path))["example"]()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_and_gets_better(path: Path) -> None:
    (numbers,) = run_ranks(1, run_example, path)
    assert numbers[-1] < 0.5 * numbers[0], numbers


def test_experts_are_shared_by_two_ranks() -> None:
    for numbers in run_ranks(2, run_example, EXAMPLES[0].with_name("experts.py")):
        assert numbers[-1] < 0.5 * numbers[0], numbers
