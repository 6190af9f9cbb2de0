"""The sizes that the documents and ``k3train show`` give for each model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from k3train.__main__ import main
from k3train.config.compose import compose
from k3train.plan.counts import count_parameters

ROOT = Path(__file__).parents[3]
ROWS = re.findall(r"^\| `(\w+)` \| ([\d,]+) \| ([\d,]+) \|", (ROOT / "docs" / "model.md").read_text(), re.M)


def test_every_model_has_its_row() -> None:
    assert {name for name, _, _ in ROWS} == {
        path.stem for path in (ROOT / "configs" / "model").glob("*.yaml")
    }


@pytest.mark.parametrize(("name", "total", "active"), ROWS)
def test_documented_sizes_are_counted_and_shown(
    name: str, total: str, active: str, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = count_parameters(compose([f"model={name}"]).model)
    assert (f"{counts.total:,}", f"{counts.active:,}") == (total, active)
    assert main(["show", f"model={name}"]) == 0
    assert re.search(rf"^all +{total} +{active}\s*$", capsys.readouterr().out, re.M)
