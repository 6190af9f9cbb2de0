"""Every file in configs/ composes and passes every rule, and files and schema do not drift apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from k3train.config.compose import compose
from k3train.config.overrides import GROUPS
from k3train.config.schema import Run

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
OPTIONS = sorted(
    (path.parent.name, path.stem) for path in CONFIGS.rglob("*.yaml") if path.parent.name != "configs"
)
STAGES = {"s256": 16_384, "s2048": 16_384, "s8192": 32_768, "s32768": 131_072}
EIGHT_RANKS = [
    "model=k3_3b",
    "cluster=gpu8",
    *(f"curriculum.stages.{name}.batch_tokens={batch}" for name, batch in STAGES.items()),
    *(f"curriculum.stages.{name}.tokens={2 * batch}" for name, batch in STAGES.items()),
    *(f"curriculum.stages.{name}.micro_batch_sequences=1" for name in STAGES),
    "curriculum.stages.s2048.parallel.ep=null",
]
K3 = ["experiment=k3"]
COMPANY = {
    ("parallel", "k3"): K3,
    ("parallel", "node8"): EIGHT_RANKS,
    ("curriculum", "k3"): K3,
    ("curriculum", "proxy"): ["experiment=proxy_gpu"],
    ("curriculum", "balance"): ["experiment=balance_debug"],
    ("curriculum", "balance_gpu"): ["experiment=balance_gpu"],
    ("cluster", "slurm"): K3,
    ("cluster", "gpu8"): EIGHT_RANKS,
    ("data", "k3"): [],
}
"""What else must be selected with files that are not made for two ranks."""


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_file_composes_and_passes(group: str, option: str) -> None:
    run = compose([*COMPANY.get((group, option), []), f"{group}={option}"])
    assert isinstance(run, Run)


def test_groups_are_the_folders() -> None:
    assert {path.name for path in CONFIGS.iterdir() if path.is_dir()} == set(GROUPS)


def test_the_guide_names_every_file() -> None:
    page = (CONFIGS.parent / "docs" / "configuration.md").read_text()
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    named = {(group, word) for group, row in rows.items() for word in row.split("`")[3::2]}
    assert named == set(OPTIONS)


def test_no_target_anywhere() -> None:
    assert [path for path in CONFIGS.rglob("*.yaml") if "_target_" in path.read_text()] == []


def test_every_file_says_what_it_is() -> None:
    for path in CONFIGS.rglob("*.yaml"):
        lines = [line for line in path.read_text().splitlines() if line != "# @package _global_"]
        assert lines[0].startswith("# "), f"{path} begins without a comment"


def test_root_lists_schema_first_and_experiment_last() -> None:
    defaults = yaml.safe_load((CONFIGS / "run.yaml").read_text())["defaults"]
    assert defaults[0] == "run_schema"
    assert defaults[-2:] == ["_self_", {"experiment": None}]
    assert {name for entry in defaults if isinstance(entry, dict) for name in entry} == set(GROUPS)


def test_k3_is_the_released_shape() -> None:
    run = compose(K3)
    model = run.model
    assert (model.num_layers, model.hidden_size, model.num_heads, model.vocab_size) == (93, 7168, 96, 163_840)
    assert (model.moe.num_experts, model.moe.top_k, model.moe.latent_size) == (896, 16, 3584)
    assert model.moe.num_shared_experts * model.moe.shared_ffn_size == 6144
    contexts = [run.curriculum.stages[name].context_tokens for name in run.curriculum.order]
    assert contexts == [8192, 65_536, 262_144, 1_048_576]


def test_debug_stages_grow_as_k3s() -> None:
    debug, k3 = compose([]).curriculum, compose(K3).curriculum
    ratios = {
        k3.stages[long].context_tokens / debug.stages[short].context_tokens
        for short, long in zip(debug.order, k3.order, strict=True)
    }
    assert ratios == {32.0}
