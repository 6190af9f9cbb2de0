"""Files that cannot be composed: what is said of them, with file, key and fix."""

from __future__ import annotations

from pathlib import Path

import pytest

import k3train.config.compose as compose_module
from k3train.config.compose import compose
from tests.config.composing import only, problems_of


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"num_layers: 3\nnum_layers: 4\n", ["repeated key num_layers", "line 2"]),
        (b"num_layers:\n\t- 3\n", ["not valid YAML", "line 2"]),
        (b"num_layers: [1, 2\n", ["not valid YAML"]),
        (b"num_layers: \xff\n", ["not UTF-8 (byte 12)"]),
        (b"- 1\n- 2\n", ["keys and values"]),
        (b"a: &a [1]\nb: *a\n", ["alias in line 2"]),
        (
            b"num_layers: !!python/object/apply:os.system ['touch /tmp/k3-was-here']\n",
            ["tag !!python/", "line 1"],
        ),
        (b"a: 1\nmla_layers: !!set {3}\n", ["tag !!set in line 2, at mla_layers"]),
        (b"mtp:\n  null: 3\n", ["null is no key (line 2, at mtp)"]),
        (b"'': 3\n", ["'' is no key (line 1)"]),
        (b"mtp: {[a]: 3}\n", ["[a] is no key (line 1, at mtp)"]),
        (b"a: 1\nnum_layers: " + b"9" * 6000 + b"\n", ["a number of 6,000 digits (line 2, at num_layers)"]),
        (b"num_layers: 0x" + b"f" * 6000 + b"\n", ["a number of 6,002 digits"]),
        (b"num_layers: ${oc.env:HOME}\n", ["${oc.env:HOME}", "line 1"]),
        (b"num_layers: " + b"[" * 5000 + b"]" * 5000 + b"\n", ["not valid YAML"]),
        (b"x: '" + b"a" * 1_000_001 + b"'\n", ["more than a configuration can have"]),
    ],
    ids=[
        "repeated",
        "tab",
        "open",
        "latin1",
        "list",
        "alias",
        "tag",
        "set",
        "null",
        "empty",
        "listed",
        "digits",
        "hexadecimal",
        "resolver",
        "deep",
        "huge",
    ],
)
def test_file_that_cannot_be_used(configs: Path, content: bytes, words: list[str]) -> None:
    (configs / "model" / "mine.yaml").write_bytes(content)
    problem = only(["model=mine"], configs)
    assert problem.id == "config.file"
    assert "mine.yaml" in str(problem)
    assert all(word in str(problem) for word in words), str(problem)
    assert not Path("/tmp/k3-was-here").exists()


def test_unused_file_with_a_mistake_stops_nobody(configs: Path) -> None:
    (configs / "model" / "mine.yaml").write_text("- a\n")
    assert compose([], configs).name == "debug"


@pytest.mark.parametrize("content", [b"", b"# nothing\n", b"\xef\xbb\xbfnum_layers: 5\n"])
def test_empty_file_and_byte_order_mark(configs: Path, content: bytes) -> None:
    (configs / "model" / "mine.yaml").write_bytes(content)
    assert compose(["model=mine"], configs).model.num_layers == 5


def test_misspelt_key_in_a_file_names_key_file_and_meaning(configs: Path) -> None:
    (configs / "model" / "mine.yaml").write_text("num_layers: 5\nmoe:\n  topk: 3\n")
    problem = only(["model=mine"], configs)
    assert (problem.id, problem.key, problem.value) == ("config.unknown-key", "model.moe.topk", 3)
    assert "model/mine.yaml" in problem.rule
    assert problem.fix == "Did you mean model.moe.top_k?"


def test_misspelt_key_in_an_experiment(configs: Path) -> None:
    text = "# @package _global_\noptim:\n  learning_rat: 3\ncurriculm: {}\n"
    (configs / "experiment" / "mine.yaml").write_text(text)
    problems = problems_of(["experiment=mine"], configs)
    fixes = {"Did you mean optim.learning_rate?", "Did you mean curriculum?"}
    assert {problem.fix for problem in problems} == fixes
    assert all("experiment/mine.yaml" in problem.rule for problem in problems)


def own_experiment(configs: Path, text: str) -> Path:
    file = configs / "experiment" / "mine.yaml"
    file.write_text(text)
    return file


def test_an_experiment_without_its_first_line_is_told_so(configs: Path) -> None:
    file = own_experiment(configs, "# Mine.\nname: mine\nseed: 3\noptim:\n  beta1: 0.8\n")
    problem = only(["experiment=mine"], configs)
    assert (problem.id, problem.fix) == ("config.experiment", "Make '# @package _global_' its first line")
    assert f"{file} does not begin with '# @package _global_'" in problem.rule
    file.write_text("# Mine.\n# @package _global_\nseed: 3\n")  # Hydra reads no line after another comment
    assert only(["experiment=mine"], configs).id == "config.experiment"
    file.write_text("\n#  @package  _global_\n# Mine.\nseed: 3\n")
    assert compose(["experiment=mine"], configs).seed == 3


@pytest.mark.parametrize("key", ["model", "/model", "override model"])
def test_an_experiment_that_selects_a_file_must_override(configs: Path, key: str) -> None:
    file = own_experiment(configs, f"# @package _global_\ndefaults:\n  - {key}: k3_3b\n")
    problem = only(["experiment=mine"], configs)
    assert problem.fix == "Write '- override /model: k3_3b'"
    assert f"{file} has '{key}: k3_3b'" in problem.rule


def test_an_experiment_that_selects_what_is_not_there_is_named(configs: Path) -> None:
    file = own_experiment(configs, "# @package _global_\ndefaults:\n  - override /model: k3_3\n")
    problem = only(["experiment=mine"], configs)
    assert (problem.key, problem.value, problem.fix) == ("model", "k3_3", "Did you mean k3_3b?")
    assert str(file) in problem.rule


@pytest.mark.parametrize(
    ("defaults", "words"),
    [
        ("model", ["has 'defaults: model', where a list of files belongs"]),
        ("null", ["has 'defaults: null'"]),
        ("[1]", ["has the entry 1 in its defaults list", "'override /GROUP: NAME'"]),
        ("['']", ["has the entry '' in its"]),
        ("[./k3]", ["has the entry ./k3 in its"]),
        ("[../model/k3]", ["has the entry ../model/k3 in its"]),
        ("[/: k3]", ["has the entry {/: k3} in its"]),
        (
            "[{override /model: k3, override /data: k3}]",
            ["has the entry {override /model: k3, override /data"],
        ),
        ("[override /model: 3]", ["has the entry {override /model: 3}"]),
        ("[override /model: {a: 1}]", ["has the entry {override /model: {a: 1}}"]),
        ("[mine]", ["selects itself in its defaults list"]),
        ("[/run]", ["mine.yaml selects run.yaml in its", "Take the entry out"]),
        ("[/experiment: mine]", ["has '/experiment: mine'", "write '- mine'"]),
        ("[override /experiment: k3]", ["has 'override /experiment: k3'", "write '- k3'"]),
        ("[optional /model: nope]", ["has 'optional /model: nope'", "override /model: nope"]),
        ("[/model@optim: k3]", ["has '/model@optim: k3'", "override /model: k3"]),
        ("[override hydra/launcher: x]", ["has 'override hydra/launcher: x'", "There are: model, "]),
        ("[k33]", ["experiment = k33 (selected in ", "Did you mean k3?"]),
        (
            "[override /model: k3, override /model: debug]",
            ["'override /model: k3' and 'override /model: deb"],
        ),
        ("[_self_, _self_]", ["Duplicate _self_ defined"]),
    ],
)
def test_a_defaults_list_that_cannot_be_followed_is_named(
    configs: Path, defaults: str, words: list[str]
) -> None:
    own_experiment(configs, f"# @package _global_\ndefaults: {defaults}\n")
    problem = str(only(["experiment=mine"], configs))
    assert "mine.yaml" in problem
    assert all(word in problem for word in words), problem
    assert "\n" not in problem


def test_files_that_select_each_other(configs: Path) -> None:
    own_experiment(configs, "# @package _global_\ndefaults: [other]\n")
    (configs / "experiment" / "other.yaml").write_text("# @package _global_\ndefaults: [mine]\n")
    assert "experiment/other.yaml selects experiment/mine.yaml in" in only(["experiment=mine"], configs).rule


def test_a_file_above_is_what_an_experiments_own_override_wins_over(configs: Path) -> None:
    own_experiment(configs, "# @package _global_\ndefaults: [other, _self_, override /model: k3_3b]\n")
    other = configs / "experiment" / "other.yaml"
    other.write_text("# @package _global_\ndefaults: [override /model: k3]\n")
    assert compose(["experiment=mine"], configs) == compose(["model=k3_3b"])
    (configs / "model" / "k3.yaml").write_text("- no settings\n")  # another model's file is not looked at
    assert compose(["experiment=mine"], configs) == compose(["model=k3_3b"])


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ("optim: [1]", "optim", "= [1] (set in experiment/mine.yaml) is a group of settings"),
        ("curriculum: {stages: [1]}", "curriculum.stages", "must be a mapping of names"),
        ("curriculum: {order: {a: 1}}", "curriculum.order", "must be a list"),
        (
            "seed: ${seed}",
            "seed",
            "= ${seed} (set in experiment/mine.yaml) cannot be resolved: it refers back",
        ),
        (
            "optim: ${optim}",
            "optim",
            "= ${optim} (set in experiment/mine.yaml) cannot be resolved: it refers",
        ),
        ("curriculum: {order: ['${nmae}']}", "curriculum.order.0", "no setting nmae. Did you mean ${name}?"),
        ("data: {sources: {1.5: {path: p}}}", "data.sources.1.5", "(set in experiment/mine.yaml) has a name"),
        ("3: 4", "3", "(set in experiment/mine.yaml) is not a setting"),
        ("optim.beta2: 0.9", "optim.beta2", "Write each part of optim.beta2 as a key of its own"),
    ],
)
def test_a_value_that_cannot_be_merged_or_resolved_names_file_key_and_text(
    configs: Path, text: str, key: str, words: str
) -> None:
    own_experiment(configs, f"# @package _global_\n{text}\n")
    problem = only(["experiment=mine"], configs)
    assert problem.key == key
    assert "(set in experiment/mine.yaml)" in problem.rule
    assert words in str(problem)


def test_what_hydra_alone_reads_is_refused(configs: Path) -> None:
    file = own_experiment(configs, "# @package _global_\nhydra: {run: {dir: x}}\n")
    problem = only(["experiment=mine"], configs)
    assert f"{file} has 'hydra: {{run: {{dir: x}}}}'" in problem.rule


def test_an_experiment_that_begins_with_a_byte_order_mark(configs: Path) -> None:
    file = own_experiment(configs, "\ufeff# @package _global_\nseed: 3\n")
    problem = only(["experiment=mine"], configs)
    assert f"{file} begins with a byte order mark" in problem.rule
    assert "without a byte order mark" in problem.fix


def test_a_date_is_text(configs: Path) -> None:
    own_experiment(configs, "# @package _global_\nname: 2026-11-31\n")
    assert compose(["experiment=mine"], configs).name == "2026-11-31"


def test_an_error_of_any_kind_while_composing_is_a_sentence(
    configs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("\nin experiment/mine: no\n  reason.\n")

    own_experiment(configs, "# @package _global_\nseed: 3\n")
    monkeypatch.setattr(compose_module, "hydra_compose", fail)
    problem = only(["experiment=mine"], configs)
    assert problem.rule == f"{configs}/experiment/mine.yaml cannot be composed: in experiment/mine: no reason"


def test_an_experiment_that_begins_from_another(configs: Path) -> None:
    own_experiment(configs, "# @package _global_\ndefaults:\n  - k3\n  - _self_\nname: mine\n")
    run = compose(["experiment=mine"], configs)
    assert (run.name, run.model.num_layers) == ("mine", 93)


def test_wrong_value_in_a_file_names_the_file(configs: Path) -> None:
    (configs / "model" / "mine.yaml").write_text("precision: fp16\n")
    problem = only(["model=mine"], configs)
    assert problem.id == "config.choice"
    assert "model/mine.yaml" in problem.rule


def test_unknown_option_in_a_defaults_list(configs: Path) -> None:
    text = "# @package _global_\ndefaults:\n  - override /model: debgu\n"
    (configs / "experiment" / "mine.yaml").write_text(text)
    problem = only(["experiment=mine"], configs)
    assert (problem.id, problem.fix) == ("config.group", "Did you mean debug?")


def test_unknown_group_in_a_defaults_list(configs: Path) -> None:
    text = "# @package _global_\ndefaults:\n  - override /modle: debug\n"
    (configs / "experiment" / "mine.yaml").write_text(text)
    problem = only(["experiment=mine"], configs)
    assert problem.id == "config.defaults"
    assert "mine.yaml has 'override /modle: debug'" in problem.rule
    assert problem.fix == "Did you mean model?"


def test_defaults_list_cannot_read_the_environment(configs: Path) -> None:
    text = "# @package _global_\ndefaults:\n  - override /model: ${oc.env:HOME}\n"
    (configs / "experiment" / "mine.yaml").write_text(text)
    assert only(["experiment=mine"], configs).id == "config.file"
