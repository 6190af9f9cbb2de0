"""A configuration of a test's own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    """A copy of the configuration that a test may spoil."""
    return Path(shutil.copytree(CONFIGS, tmp_path / "configs"))
