"""How problems and values read."""

from __future__ import annotations

import pytest

from k3train.config.nearest import choices, divisors, multiples
from k3train.config.problems import ConfigError, ConfigProblem, shown


def test_problem_is_one_line_with_all_its_parts() -> None:
    problem = ConfigProblem("parallel.tp", 3, "must divide 4", "Use 2 or 4", "parallel.heads-tp")
    assert str(problem) == "parallel.tp = 3 must divide 4. Use 2 or 4. [parallel.heads-tp]"


def test_error_counts_and_lists() -> None:
    problem = ConfigProblem("", None, "the folder is empty", "Did you mean x?", "config.folder")
    assert str(ConfigError([problem])) == (
        "1 problem in the configuration:\n  the folder is empty. Did you mean x? [config.folder]"
    )
    assert str(ConfigError([problem, problem])).startswith("2 problems")


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "null"), (True, "true"), (False, "false"), (3, "3"), (1e-5, "1e-05"), ("words", "words"),
     ("", "''"), ("a\nb", "'a\\nb'"), ([1, "a", None], "[1, a, null]"), ({"a": [True]}, "{a: [true]}")],
)  # fmt: skip
def test_values_read_as_typed(value: object, text: str) -> None:
    assert shown(value) == text


def test_long_values_are_cut() -> None:
    assert len(shown("x" * 1000)) == 80


def test_nearest() -> None:
    assert divisors(96, 5) == [4, 6]
    assert divisors(7, 3) == [1, 7]
    assert divisors(1, 9) == [1]
    assert multiples(10, 4) == [8, 12]
    assert multiples(2, 4) == [4]
    assert choices([1, 2, 3]) == "1, 2 or 3"
