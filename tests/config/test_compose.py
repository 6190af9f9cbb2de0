"""Composition: what overrides may say and how it is told when they do not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import k3train.config.compose as compose_module
from k3train.config.compose import compose, find_config_dir
from k3train.config.schema import Device, Precision, Recompute
from tests.config.composing import only, problems_of

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = REPOSITORY / "configs"


# ------------------------------------------------------------------------------------------- what works


def test_no_arguments_is_the_debug_experiment() -> None:
    assert compose([]) == compose(["experiment=debug"])


def test_plus_experiment_is_the_same() -> None:
    assert compose(["+experiment=k3"]) == compose(["experiment=k3"])
    assert compose(["experiment=k3"]).model.num_layers == 93


def test_overrides_win_over_the_experiment() -> None:
    run = compose(["experiment=k3", "name=mine", "optim.learning_rate=1e-4", "model.mtp.num_layers=0"])
    assert (run.name, run.dir, run.optim.learning_rate) == ("mine", "runs/mine", 1e-4)


def test_values_get_the_types_of_the_schema() -> None:
    run = compose(["device=cuda", "model.precision=bf16", "parallel.recompute=full", "optim.learning_rate=1"])
    assert (run.device, run.model.precision) == (Device.cuda, Precision.bf16)
    assert run.parallel.recompute is Recompute.full
    assert type(run.optim.learning_rate) is float


def test_plain_whole_numbers_for_tokens() -> None:
    run = compose(["curriculum.stages.s256.tokens=4_096_000"])
    assert run.curriculum.stages["s256"].tokens == 4_096_000


def test_names_can_be_added_to_mappings() -> None:
    run = compose(["data.sources.mine.path=corpus/mine", "curriculum.stages.s256.mix={mine: 1, code: 0.5}"])
    assert run.data.sources["mine"].path == "corpus/mine"
    assert run.curriculum.stages["s256"].mix == {"mine": 1.0, "code": 0.5}


def test_null_unsets_what_may_be_unset() -> None:
    assert compose(["model=k3_proxy", "model.mla_layers=null"]).model.mla_layers is None


def test_reference_to_another_setting() -> None:
    assert compose(["name=a", "monitor.wandb_project=${name}"]).monitor.wandb_project == "a"


def test_writes_nothing_and_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    compose(["experiment=k3"])
    assert list(tmp_path.iterdir()) == []
    assert Path.cwd() == tmp_path


def test_folder_from_the_environment(configs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (configs / "model" / "mine.yaml").write_text("num_layers: 7\n")
    monkeypatch.setenv("K3TRAIN_CONFIGS", str(configs))
    assert compose(["model=mine"]).model.num_layers == 7
    assert find_config_dir(CONFIGS) == CONFIGS


# --------------------------------------------------------------------------------------- refused overrides


@pytest.mark.parametrize(
    ("override", "id", "words"),
    [
        ("+model.num_layers=3", "config.override", "Write model.num_layers=3"),
        ("++model.num_layers=3", "config.override", "Write model.num_layers=3"),
        ("+a=1", "config.override", "begins with '+'"),
        ("+foo=5", "config.override", "reads. Settings begin with name"),
        ("+seeed=5", "config.override", "reads. Did you mean seed?"),
        ("+seed=5", "config.override", "reads. Write seed=5."),
        ("++experiment=debug", "config.override", "Write experiment=debug"),
        ("~model.num_layers", "config.override", "takes a setting away"),
        ("seed=1,2", "config.override", "several values"),
        ("seed=range(3)", "config.override", "several values"),
        ("model=glob(*)", "config.override", "several values"),
        ("hydra.run.dir=x", "config.override", "Hydra itself"),
        ("hydra/launcher=joblib", "config.override", "Hydra itself"),
        ("model@other=k3", "config.override", "Hydra itself"),
        ("seed", "config.override", "Write KEY=VALUE"),
        ("seed=[1", "config.override", "cannot be read"),
        ("--seed=1", "config.override", "no dashes"),
        ("=3", "config.override", "cannot be read"),
        ("name=" + "[" * 3000 + "]" * 3000, "config.override", "cannot be read"),
        ("curriculum.order.9=x", "config.compose", "curriculum.order.9"),
        ("seed=???", "config.missing-key", "Set seed"),
        ("curriculum.order={a: 1}", "config.type", "must be a list"),
        ("data.sources={}", "config.override", "select another file, as data=NAME"),
        ("curriculum.stages={}", "config.override", "takes no entries away"),
        ("curriculum.stages.s256.mix={}", "config.override", "adds nothing"),
        ("", "config.override", "cannot be read"),
        ("seed=" + "9" * 6000, "config.override", "Write a shorter number"),
        ("curriculum.order=[a,{b: {null: 3}}]", "config.name", "the name null"),
        (
            "data.sources={null: {path: p}}",
            "config.name",
            "data.sources = {null: {path: p}} holds the name null",
        ),
        ("name=${oc.env:HOME}", "config.interpolation", "nothing in a value is ever run"),
        ("name='a ${oc.env:HOME}'", "config.interpolation", "nothing in a value is ever run"),
        ("data.sources.x={path: '${oc.decode:1}'}", "config.interpolation", "ever run"),
        ("name=${hydra:job.name}", "config.interpolation", "ever run"),
        ("name=${name}", "config.interpolation", "cannot be resolved"),
        ("name=${nmae}", "config.interpolation", "cannot be resolved"),
        ("data.heldout={_target_: os.system}", "config.name", "letters, digits"),
        ("model._target_=os.system", "config.unknown-key", "is not a setting"),
        ("_target_=os.system", "config.unknown-key", "is not a setting"),
    ],
)
def test_refused_form(override: str, id: str, words: str) -> None:
    problem = only([override])
    assert problem.id == id
    assert words in str(problem)
    assert "\n" not in str(problem)


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("model.hiden_size=3", "model.hidden_size"),
        ("model.num_layer=3", "model.num_layers"),
        ("seeed=3", "seed"),
        ("modl.hidden_size=3", "model.hidden_size"),
        ("learning_rate=3", "optim.learning_rate"),
        ("optim.lerning_rate=3", "optim.learning_rate"),
        ("num_experts=3", "model.moe.num_experts"),
        ("model.num_experts=3", "model.moe.num_experts"),
        ("moe.top_k=3", "model.moe.top_k"),
        ("model.moe.router.quantile.binz=3", "model.moe.router.quantile.bins"),
        ("curriculum.stages.s256.contxt_tokens=3", "curriculum.stages.s256.context_tokens"),
        ("curriculum.stages.s256.learning_rate.peek=3", "curriculum.stages.s256.learning_rate.peak"),
        ("stages.s256.tokens=3", "curriculum.stages.s256.tokens"),
        ("checkpoint.save_every_steps=3", "checkpoint.every_steps"),
        ("model.num_layers.x=3", None),
        ("zzzzqqq=3", None),
        ("optim._target_=os.system", ""),
        ("model.foo=3", ""),
    ],
)
def test_unknown_key_suggests_the_right_one(override: str, meant: str | None) -> None:
    """``meant`` is empty where nothing known is like it."""
    problem = only([override])
    assert problem.id == "config.unknown-key"
    assert problem.key == override.partition("=")[0]
    if meant:
        assert problem.fix == f"Did you mean {meant}?"
    if meant == "":
        assert problem.fix.startswith("Settings begin with name, ")


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("model=debgu", "Did you mean debug?"),
        ("experiment=debug-gpu", "Did you mean debug_gpu?"),
        ("+experiment=debgu", "Did you mean debug?"),
        ("optim=zzz", "Use adamw"),
        ("model={num_layers: 3}", "Set single keys as model.KEY=VALUE, or select debug"),
        ("model=null", "Set single keys"),
        ("model=", "Set single keys"),
        ("model=../../etc/passwd", "Use debug"),
    ],
)
def test_unknown_option(override: str, fix: str) -> None:
    problem = only([override])
    assert problem.id == "config.group"
    assert problem.fix.startswith(fix)


@pytest.mark.parametrize(
    ("override", "id", "words"),
    [
        ("device=cpuu", "config.choice", ["auto, cpu, cuda", "mean cpu?"]),
        ("device=0", "config.choice", ["auto, cpu, cuda"]),
        ("parallel.recompute=null", "config.choice", ["Use none, selective or full"]),
        ("seed=true", "config.type", ["seed = true", "a whole number", "is true or false"]),
        ("seed=1.5", "config.type", ["a whole number"]),
        ("seed=abc", "config.type", ["a whole number but is text"]),
        ("seed='3'", "config.type", ["without quotes"]),
        ("seed=null", "config.type", ["is null"]),
        ("curriculum.stages.s256.tokens=3e9", "config.type", ["tokens=3_000_000_000"]),
        ("optim.learning_rate=false", "config.type", ["a number but is true or false"]),
        ("optim.learning_rate='1e-5'", "config.type", ["without quotes"]),
        ("optim.learning_rate=nan", "config.finite", ["finite"]),
        ("optim.learning_rate=inf", "config.finite", ["finite"]),
        ("optim.learning_rate=-inf", "config.finite", ["finite"]),
        ("optim.learning_rate=1" + "0" * 400, "config.finite", ["finite"]),
        ("monitor.wandb=1", "config.type", ["true or false but is a whole number"]),
        ("monitor.wandb=yes", "config.type", ["true or false but is text"]),
        ("name=7", "config.type", ["quotes"]),
        ("name=[a]", "config.type", ["is a list"]),
        ("model.kda=3", "config.type", ["model.kda.KEY=VALUE"]),
        ("model.mla_layers=4", "config.type", ["model.mla_layers=[a,b]"]),
        ("model.mla_layers=[1,true]", "config.type", ["model.mla_layers.1", "a whole number"]),
        ("data.sources=[a]", "config.type", ["data.sources.KEY=VALUE"]),
        ("data.sources.code=corpus", "config.type", ["settings of its own"]),
        ("data.sources={code: corpus}", "config.type", ["data.sources.code = corpus", "path"]),
        ("curriculum.stages.s256.mix={code: [1]}", "config.type", ["mix.code", "is a list"]),
    ],
)
def test_wrong_type_names_key_value_and_expected(override: str, id: str, words: list[str]) -> None:
    problem = only([override])
    assert problem.id == id
    assert problem.key.startswith(override.partition("=")[0])
    assert all(word in str(problem) for word in words), str(problem)


@pytest.mark.parametrize(
    ("first", "second"),
    [("seed=1", "seed=2"), ("model=k3", "model=k3_3b"), ("experiment=k3", "+experiment=debug")],
)
def test_a_key_that_is_set_twice(first: str, second: str) -> None:
    problem = only([first, "name=x", second])
    assert problem.id == "config.override"
    assert f"'{first}' and '{second}' set the same key" in str(problem)
    assert compose([first, first]) == compose([first])


def test_missing_keys_of_a_new_stage() -> None:
    problems = problems_of(["curriculum.stages.more.tokens=256"])
    missing = {problem.key for problem in problems if problem.id == "config.missing-key"}
    assert missing == {"curriculum.stages.more.context_tokens", "curriculum.stages.more.batch_tokens"}


def test_everything_is_reported_together() -> None:
    given = ["model.hiden_size=3", "++a=1", "optim=sgd", "seed=true", "device=gpu", "checkpoint.keep=0",
             "curriculum.order=[s256,s2048,s8192]", "parallel.tp=3", "name=${oc.env:HOME}"]  # fmt: skip
    ids = [problem.id for problem in problems_of(given)]
    expected = {"config.unknown-key", "config.override", "config.group", "config.type", "config.choice",
                "range", "curriculum.unused-stage", "parallel.heads-tp", "config.interpolation"}  # fmt: skip
    assert expected <= set(ids)


def test_a_misread_value_is_not_blamed_twice() -> None:
    assert {problem.key for problem in problems_of(["model.num_heads=many"])} == {"model.num_heads"}
    assert {problem.key for problem in problems_of(["curriculum.stages.s256.batch_tokens=many"])} == {
        "curriculum.stages.s256.batch_tokens"
    }


# ------------------------------------------------------------------------------------------- the folder


def test_folder_without_configuration(tmp_path: Path) -> None:
    problem = only([], tmp_path)
    assert problem.id == "config.no-folder"
    assert str(tmp_path) in str(problem)


def test_installed_without_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose_module, "_CHECKOUT_CONFIGS", tmp_path / "nowhere")
    monkeypatch.delenv("K3TRAIN_CONFIGS", raising=False)
    problem = only([])
    assert "installed without a checkout" in problem.rule
    assert "--config-dir" in problem.fix


def test_no_torch_is_imported() -> None:
    program = (
        "import sys\n"
        "from k3train.__main__ import main\n"
        "assert main(['check', 'experiment=k3']) == 0\n"
        "assert main(['show', 'experiment=k3']) == 0\n"
        "assert main(['check', 'model.moe.top_k=99']) == 2\n"
        "heavy = {'torch', 'megatron', 'triton', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
