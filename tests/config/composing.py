"""What composition refuses, for tests to look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3train.config.compose import compose
from k3train.config.problems import ConfigError, ConfigProblem


def problems_of(overrides: list[str], config_dir: Path | None = None) -> list[ConfigProblem]:
    with pytest.raises(ConfigError) as error:
        compose(overrides, config_dir)
    return error.value.problems


def only(overrides: list[str], config_dir: Path | None = None) -> ConfigProblem:
    problems = problems_of(overrides, config_dir)
    assert len(problems) == 1, [str(problem) for problem in problems]
    return problems[0]
