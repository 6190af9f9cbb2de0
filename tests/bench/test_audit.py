"""The numeric audit of KDA: exponents, errors, verdicts and bounds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from rich.console import Console

from k3train.bench.audit import PEER, audit, largest_tile, refusal
from k3train.bench.kda_inputs import GRADIENTS, REGIMES, kda_inputs
from k3train.bench.table import print_audit
from k3train.kernels.kda.reference import bounded_gate, kda_reference

SHAPE = {"tokens": 64, "heads": 1, "documents": 1, "batch": 1, "head_dim": 16}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return audit(SHAPE, -5.0, torch.device("cpu"))


def test_every_regime_and_dtype_has_errors_within_the_dtype(found: dict[str, Any]) -> None:
    rows = {(row["path"], row["dtype"], row["regime"]): row for row in found["errors"]}
    paths = ("reference", "chunked torch")
    dtypes = ("bfloat16", "float16", "float32")
    assert set(rows) >= {(path, dtype, regime) for path in paths for dtype in dtypes for regime in REGIMES}
    limits = {"bfloat16": 4e-3, "float32": 1e-5}
    for (_, dtype, _), row in rows.items():
        assert list(row["errors"]) == ["o", *GRADIENTS]
        assert row["finite"]
        if dtype in limits:
            assert max(row["errors"][name] for name in ("o", "dq", "dk", "dv", "dbeta")) < limits[dtype], row


def test_bf16_can_carry_the_factors_and_fp16_cannot(found: dict[str, Any]) -> None:
    assert found["verdict"]["bfloat16"]["yes"]
    assert not found["verdict"]["float16"]["yes"]
    assert "a tile may have 4 tokens, not 32" in found["verdict"]["float16"]["reason"]
    for row in found["operands"]:
        assert row["bfloat16"]["overflowed"] == 0
        assert row["bfloat16"]["error"] < 1e-2
        assert row["float16"]["overflowed"] > 0.1
        assert row["float16"]["error"] is None
    saturated = next(row for row in found["operands"] if row["regime"] == "saturated")
    assert saturated["log2"][1] == pytest.approx(80 / math.log(2), abs=2)


def test_the_peer_stands_beside_and_takes_no_part_in_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that is wrong in one regime and fails in another: numbers beside ours, and a reason."""

    def wrong(x: list[torch.Tensor], bound: float) -> torch.Tensor:
        if float(x[3].float().mean()) < -4:
            raise RuntimeError("no kernel image")
        return (x[0] + x[1] + x[2] + x[3]) * x[4][..., None] * x[5].sum() * x[6].sum()

    monkeypatch.setattr("k3train.bench.audit.fla_kda", wrong)
    monkeypatch.setattr("k3train.bench.audit._no_peer", lambda device: "")
    found = audit(SHAPE, -5.0, torch.device("cpu"))
    theirs = {row["regime"]: row for row in found["errors"] if row["path"] == PEER}
    assert 0 < len(theirs) < len(REGIMES)
    assert min(row["errors"]["o"] for row in theirs.values()) > 0.1
    assert "no kernel image" in found["not_run"][PEER]
    assert found["verdict"]["bfloat16"]["yes"]


def test_the_table_holds_every_verdict(found: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    print_audit(found, Console(width=170))
    printed = capsys.readouterr().out
    for words in ("bfloat16: yes", "float16: no", "not run: Hopper kernels", f"not run: {PEER}", "residual"):
        assert words in printed, words


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bound", [-0.5, -5.0, -8.0])
def test_the_largest_tile_fits_and_the_next_does_not(bound: float, dtype: torch.dtype) -> None:
    tile = largest_tile(bound, dtype)
    factors = torch.tensor([-bound * tokens / 2 for tokens in (tile, tile + 1)], dtype=torch.float64).exp()
    largest = torch.finfo(dtype).max
    assert factors[0] <= largest < factors[1]


def test_bounds_are_refused_from_where_the_tile_overflows() -> None:
    assert refusal(-5.0) == ""
    assert refusal(-5.5) == ""
    assert "the largest tile that fits has 31 tokens, 16 as a power of two" in refusal(-5.6)


def test_a_bound_that_paths_were_not_built_for_is_audited_on_the_reference() -> None:
    found = audit(SHAPE, -5.4, torch.device("cpu"))
    assert {row["path"] for row in found["errors"]} == {"reference"}
    assert "built for bounds in [-5, 0)" in found["not_run"]["chunked torch"]


def test_regimes_are_what_they_are_called() -> None:
    def gate(regime: str) -> torch.Tensor:
        x = kda_inputs(regime, (1, 64, 2, 16), device="cpu", dtype=torch.float32)
        return bounded_gate(x[3], x[5], x[6], -5.0)

    assert gate("saturated").max() < -4.9
    assert gate("slow").min() > -0.5
    assert gate("alternating")[..., ::2].max() < -4.5
    assert gate("alternating")[..., 1::2].min() > -0.5
    q, k, v, z, beta, a, bias = kda_inputs("residual", (1, 64, 2, 16), device="cpu", dtype=torch.float32)
    _, state = kda_reference(q, k, v, z, beta, a, bias, gate_lower_bound=-5.0)
    key = torch.nn.functional.normalize(k[:, 60], dim=-1)
    left = v[:, 60] - torch.einsum("bhk,bhkv->bhv", key, state)
    assert left.norm() < 0.6 * v[:, 60].norm()
