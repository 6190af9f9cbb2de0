"""The resolved file: complete, strict, written whole or not at all; and what a second start may change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from k3train.config.compare import compare, differences, settle
from k3train.config.compose import compose, load_resolved, replace_resolved, save_resolved, to_yaml
from k3train.config.problems import ConfigError
from tests.config.trees import four_stage_run


@pytest.mark.parametrize(
    "overrides", [[], ["experiment=k3"], ["model=k3_proxy", "optim.min_learning_rate=1e-7"]]
)
def test_round_trip(tmp_path: Path, overrides: list[str]) -> None:
    run = compose(overrides)
    save_resolved(run, tmp_path / "run.yaml")
    assert load_resolved(tmp_path / "run.yaml") == run


def test_file_holds_every_setting() -> None:
    tree = yaml.safe_load(to_yaml(four_stage_run()))
    assert tree["dir"] == "runs/debug"
    assert tree["curriculum"]["stages"]["s8192"]["parallel"]["cp"] == 2
    assert tree["curriculum"]["stages"]["s8192"]["parallel"]["tp"] is None
    assert tree["model"]["moe"]["router"]["rule"] == "quantile"


def test_saving_twice_is_fine_and_leaves_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "run.yaml"
    save_resolved(four_stage_run(), path)
    save_resolved(four_stage_run(), path)
    assert [entry.name for entry in path.parent.iterdir()] == ["run.yaml"]


def test_another_run_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    save_resolved(four_stage_run(), path)
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        save_resolved(four_stage_run({"seed": 9}), path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.yaml"]


def test_replacing(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    save_resolved(four_stage_run(), path)
    replace_resolved(four_stage_run({"seed": 9}), path)
    assert load_resolved(path).seed == 9
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.yaml"]


@pytest.mark.parametrize(
    ("text", "id"),
    [
        ("modle: {}\n", "config.unknown-key"),
        ("model:\n  num_layers: 5.0\n", "config.type"),
        ("model:\n  num_layers: '5'\n", "config.type"),
        ("model: 3\n", "config.type"),
        ("device: gpu\n", "config.choice"),
        ("optim:\n  learning_rate: .nan\n", "config.finite"),
        ("name: ${oc.env:HOME}\n", "config.file"),
        ("data:\n  sources:\n    a: {path: x}\n    a: {path: y}\n", "config.file"),
        ("data:\n  sources:\n    1: {path: x}\n", "config.name"),
        ("seed: 2020-01-01\n", "config.type"),
        ("seed: !!python/name:os.system\n", "config.file"),
        ("a: &a [*a]\n", "config.file"),
        ("- 1\n", "config.file"),
        ("words\n", "config.file"),
        ("checkpoint:\n  keep: 1\n", "range"),
    ],
)
def test_file_is_read_as_strictly_as_the_command_line(tmp_path: Path, text: str, id: str) -> None:
    sound = yaml.safe_load(to_yaml(four_stage_run()))
    path = tmp_path / "run.yaml"
    for key in ("model", "data", "optim", "device", "name", "seed", "checkpoint"):
        if text.startswith(f"{key}:"):
            del sound[key]
    path.write_text(text + (yaml.safe_dump(sound) if not text.startswith(("-", "words")) else ""))
    with pytest.raises(ConfigError) as error:
        load_resolved(path)
    assert id in {problem.id for problem in error.value.problems}, str(error.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a file"):
        load_resolved(tmp_path / "run.yaml")


def test_numbers_with_an_exponent_survive_an_editor(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(to_yaml(four_stage_run()).replace("learning_rate: 0.002", "learning_rate: 2e-3"))
    assert load_resolved(path).optim.learning_rate == 0.002


# ------------------------------------------------------------------------------------------ what changed

BATCH = "curriculum.stages.s2048.batch_tokens"


@pytest.mark.parametrize(
    ("changes", "steps", "is_identity"),
    [
        ({"seed": 9}, 0, True),
        ({"model.hidden_size": 256}, 0, True),
        ({"model.moe.router.bins": 10}, 0, True),
        ({"data.sources.code.path": "elsewhere"}, 0, True),
        ({"data.tokenizer": "elsewhere"}, 0, True),
        ({"data.heldout": {}}, 0, False),
        ({"data.prefetch_steps": 0}, 0, False),
        ({"optim.learning_rate": 0.1}, 50, False),
        ({"cluster.ranks_per_node": 4}, 50, False),
        ({"checkpoint.keep": 5}, 50, False),
        ({"curriculum.stages.s256.tokens": 8192}, 0, False),
        ({"curriculum.stages.s256.tokens": 8192}, 1, True),
        ({"curriculum.stages.s256.mix": {"code": 1.0}}, 1, True),
        ({"curriculum.stages.s256.parallel.ep": 2}, 1, False),
        ({"curriculum.stages.s256.micro_batch_sequences": 1}, 1, False),
        ({"curriculum.stages.s256.learning_rate.peak": 0.001}, 1, False),
        ({BATCH: 16_384}, 40, False),
        ({BATCH: 16_384}, 41, True),
        ({"curriculum.order": ["s2048", "s256", "s8192", "s32768"]}, 0, False),
        ({"curriculum.order": ["s2048", "s256", "s8192", "s32768"]}, 1, True),
        ({"curriculum.order": ["s256", "s2048"]}, 1, False),
    ],
)
def test_what_may_change(changes: dict[str, Any], steps: int, is_identity: bool) -> None:
    identity, tunable = compare(four_stage_run(), four_stage_run(changes), trained_steps=steps)
    assert (len(identity) > 0, len(tunable) > 0) == (is_identity, not is_identity)


def test_difference_of_a_whole_stage() -> None:
    old = four_stage_run()
    new = four_stage_run({"curriculum.stages.s256": ...})
    keys = {difference.key for difference in differences(old, new)}
    assert "curriculum.stages.s256.context_tokens" in keys
    assert all(difference.new is None for difference in differences(old, new))


def test_going_on_with_a_changed_run(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    assert settle(four_stage_run(), path) == []
    assert settle(four_stage_run(), path) == []
    changed = settle(four_stage_run({"optim.beta2": 0.99}), path)
    assert [str(difference) for difference in changed] == ["optim.beta2: 0.95 -> 0.99"]
    assert load_resolved(path).optim.beta2 == 0.99


def test_going_on_with_another_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    settle(four_stage_run(), path)
    with pytest.raises(ConfigError) as error:
        settle(four_stage_run({"seed": 9, "model.num_heads": 8, "optim.beta2": 0.99}), path)
    assert [(p.key, p.id) for p in error.value.problems] == [
        ("seed", "run.identity"),
        ("model.num_heads", "run.identity"),
    ]
    assert load_resolved(path) == four_stage_run(), "nothing was written"
