"""When balance sets off an alarm, and what a saved step gives back."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from k3train.config.compose import compose, replace_resolved, save_resolved
from k3train.config.problems import BadInput
from k3train.config.schema import BalanceAlarms, Quantile
from k3train.monitor.alarms import AlarmBell
from k3train.monitor.balance_file import Saved, read_saved, save_step
from k3train.monitor.replay import merged_bias, print_balance
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
    with pytest.raises(BadInput, match=r"--bins 7 does not divide the 120 bins .*: use 6 or 8"):
        merged_bias(again, 0, 7)


def saved_step(**changes: np.ndarray) -> Saved:
    """Two layers of four experts."""
    arrays = {
        "layers": np.array([2, 3]),
        "loads": np.full((2, 4), 10),
        "statistics": np.full((2, 4, 8), 5),
        "bias": np.zeros((2, 4), np.float32),
        "bounds": np.tile(np.array([-1, 1], np.float32), (2, 1)),
    }
    return Saved(top_k=1, **(arrays | changes))


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:200]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_text("hello"),
        lambda path: np.save(path.open("wb"), np.zeros(3)),
        lambda path: np.savez(path, other=np.zeros(3)),
        lambda path: path.rename(path.with_name("step_last.npz")),
        lambda path: save_step(path.parents[1], 4, 0, saved_step(bias=np.zeros((2, 3), np.float32))),
        lambda path: save_step(path.parents[1], 4, 0, saved_step(loads=np.zeros((2, 4)))),
        lambda path: save_step(path.parents[1], 4, 0, saved_step(statistics=np.zeros((2, 4), int))),
    ],
    ids=["cut", "empty", "text", "array", "foreign", "renamed", "other experts", "floats", "no bins"],
)
def test_a_damaged_or_foreign_file_is_named(damage: Callable[[Path], object], tmp_path: Path) -> None:
    save_step(tmp_path, 4, 0, saved_step())
    assert [step for step, _ in read_saved(tmp_path)] == [4]
    damage(tmp_path / "balance" / "step_00000004.pipeline_000.npz")
    (left,) = (tmp_path / "balance").iterdir()
    with pytest.raises(BadInput) as error:
        list(read_saved(tmp_path))
    assert str(error.value) == (
        f"{left} is not what monitor.balance.save_every_steps writes, or a part of it is missing: remove it"
    )


def printed(run_dir: Path, **options: int | None) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    print_balance(run_dir, console, **{"last": 9, "bins": None} | options)
    return console.export_text()


def record(step: int, **numbers: float) -> str:
    values = {name: [number, 2 * number] for name, number in numbers.items()}
    return json.dumps(
        {"kind": "balance", "attempt": 1, "step": step, "tokens": 9, "stage": "s", "layers": [2, 3]}
        | {"values": values}
    )


def test_numbers_of_audited_steps_are_means_over_those(tmp_path: Path) -> None:
    usual = dict.fromkeys(COLUMNS, 1.0)
    audit = {"exact_error": 0.125, "own_violation": 0.25}
    lines = [record(1, **usual), record(2, **usual, **audit), record(3, **usual)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    table, audited = printed(tmp_path).split("mean of 1 audited steps, 2 to 2")
    rows = [next(line for line in text.splitlines() if line.startswith("│ 3")) for text in (table, audited)]
    usual_means, audit_means = ([float(cell) for cell in row.split("│")[2:-1]] for row in rows)
    assert "saturated experts" in table
    assert usual_means == [2.0] * 7
    assert audit_means == [0.25, 0.5]


def test_bins_without_a_histogram_are_refused_before_anything_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text(record(1, **dict.fromkeys(COLUMNS, 1.0)) + "\n")
    with pytest.raises(BadInput, match=r"saved while training, with monitor\.balance\.save_every_steps=50 "):
        print_balance(tmp_path, Console(), last=9, bins=4)
    assert capsys.readouterr().out == ""


def test_a_file_without_a_record_is_damaged_and_one_without_balance_lacks_a_setting(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"kind": "st')
    with pytest.raises(
        BadInput, match=f"{metrics} holds no record: nothing has been trained, or the file is"
    ):
        print_balance(tmp_path, Console(), last=9, bins=None)
    metrics.write_text(record(1).replace("balance", "step") + "\n")
    with pytest.raises(BadInput, match=r"set monitor\.balance\.layers_every_steps"):
        print_balance(tmp_path, Console(), last=9, bins=None)
    save_resolved(compose([]), tmp_path / "run.yaml")
    with pytest.raises(BadInput, match=r"set monitor\.balance\.layers_every_steps"):
        print_balance(tmp_path, Console(), last=9, bins=None)
    replace_resolved(compose(["model.num_dense_layers=4"]), tmp_path / "run.yaml")
    with pytest.raises(BadInput, match=r"none of its layers has experts \(model\.num_dense_layers = 4\)"):
        print_balance(tmp_path, Console(), last=9, bins=None)


def test_steps_of_a_rule_without_a_histogram_are_replayed_beside_others(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(record(1, **dict.fromkeys(COLUMNS, 1.0)) + "\n")
    save_step(tmp_path, 1, 0, saved_step(statistics=np.zeros((2, 4, 0), int)))
    text = printed(tmp_path)
    assert text.count("no histogram") == 2
    with pytest.raises(BadInput, match="has no histogram for --bins 4: only rule quantile has one"):
        printed(tmp_path, bins=4)
    save_step(tmp_path, 2, 0, saved_step())
    text = printed(tmp_path, bins=4)
    assert text.count("no histogram") == text.count("differs by") == 2
