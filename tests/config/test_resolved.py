"""The resolved file: complete, strict, written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

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


def test_every_problem_comes_with_the_file_it_is_in(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    for text, words in (
        ("", "is empty. Remove it"),
        ("# nothing\n", "is empty"),
        ("seed: 1\n", "data.sources"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=rf"^\d+ problems? in {path}:\n") as error:
            load_resolved(path)
        assert words in str(error.value)


def test_a_file_that_is_no_text_any_more_can_be_removed(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    removed = "or remove it, and start its run again with the settings that it had. [config.file]"
    for content, words in ((b"\xff\x00", "is not UTF-8 (byte 0)"), (bytes(4096), "is not valid YAML")):
        path.write_bytes(content)
        with pytest.raises(ConfigError) as error:
            load_resolved(path)
        assert words in str(error.value)
        assert str(error.value).endswith(removed)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError) as error:
        load_resolved(path)
    assert str(error.value).endswith(f"{path} is not a file. Give a YAML file, {removed}")
    with pytest.raises(ConfigError) as error:
        load_resolved(tmp_path)  # the folder of a run, which nobody is told to remove
    assert "remove" not in str(error.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a file"):
        load_resolved(tmp_path / "run.yaml")


def test_numbers_with_an_exponent_survive_an_editor(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(to_yaml(four_stage_run()).replace("learning_rate: 0.002", "learning_rate: 2e-3"))
    assert load_resolved(path).optim.learning_rate == 0.002
