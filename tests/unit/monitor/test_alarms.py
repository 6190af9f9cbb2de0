"""When balance sets off an alarm, and what a saved step gives back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from k3train.config.problems import BadInput
from k3train.config.schema import BalanceAlarms, Quantile
from k3train.monitor.alarms import AlarmBell
from k3train.monitor.balance_file import Saved, read_saved, save_step
from k3train.monitor.replay import merged_bias
from k3train.router.metrics import COLUMNS
from k3train.router.quantile import QuantileBalance
from tests.unit.router.test_quantile import observe, random_scores, solve


def layers(**numbers: float) -> dict[int, dict[str, float]]:
    """Two layers of which the second has these numbers."""
    return {2: dict.fromkeys(COLUMNS, 0.0), 3: dict.fromkeys(COLUMNS, 0.0) | numbers}


def test_rings_once_after_patience_and_again_after_a_rest() -> None:
    bell = AlarmBell(BalanceAlarms(patience_steps=3, max_violation=1.0))
    rung = [len(bell.check(layers(max_violation=v))) for v in (2, 2, 0.5, 2, 2, 2, 2, 2, 1.0, 2, 2, 2)]
    assert rung == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1]


def test_says_what_rang() -> None:
    bell = AlarmBell(BalanceAlarms(patience_steps=1, max_violation=None))
    rung = bell.check(layers(max_violation=50, dead_experts=3, saturated_experts=1, bias_range=1.4))
    assert [(alarm.quantity, alarm.value, alarm.layer, alarm.threshold) for alarm in rung] == [
        ("dead_experts", 3, 3, 0),
        ("saturated_experts", 1, 3, 0),
    ]


def test_a_saved_step_gives_the_same_bias_and_coarser_bins_another(tmp_path: Path) -> None:
    rule, bias, scores = QuantileBalance(8, 2, Quantile(bins=120)), torch.zeros(8), random_scores(3000, 8, 1)
    observe(rule, scores, bias, 2)
    loads = torch.bincount(scores.topk(2).indices.flatten(), minlength=8)
    saved = Saved(
        layers=np.array([4]),
        loads=loads[None].numpy(),
        statistics=rule.statistics()[None].numpy(),
        bias=bias[None].numpy(),
        bounds=rule.bounds(bias)[None].numpy(),
        top_k=2,
    )
    for step in (30, 4):
        save_step(tmp_path, step, 0, saved)
    save_step(tmp_path, 4, 0, saved)  # trained again after a restart
    (first, again), _ = read_saved(tmp_path)
    assert first == 4
    whole = merged_bias(again, 0, 120)
    assert torch.equal(whole, solve(rule, bias, rule.statistics()))
    assert 0 < float((merged_bias(again, 0, 12) - whole).abs().max()) < 2 * 2 / 12
    with pytest.raises(BadInput, match="--bins 7 does not divide the 120 bins"):
        merged_bias(again, 0, 7)
