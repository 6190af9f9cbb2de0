"""Every rule fires exactly once for the run that breaks it, and says a value that would pass."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import k3train.config.rules as rules_module
from k3train.config.keys import flattened, follow, without_none
from k3train.config.ranges import RANGES
from k3train.config.rules import check
from k3train.config.texts import FILLED
from tests.config.trees import four_stage_run

ONE_STAGE: dict[str, Any] = {
    "curriculum.order": ["only"],
    "curriculum.stages": {"only": {"context_tokens": 256, "tokens": 8192, "batch_tokens": 2048}},
    "cluster.ranks_per_node": 1,
}
"""A smaller base, so that a wrong degree is wrong in one stage."""
AT = "curriculum.stages.only"

BROKEN: list[tuple[str, dict[str, Any], str, str]] = [
    # id, changes to the one-stage run, key at fault, words of the fix
    ("run.name", {"name": "a b"}, "name", "Use letters, digits"),
    ("run.name", {"name": "a$b"}, "name", "Use letters, digits"),
    ("run.name", {"name": "a//b"}, "name", "Use letters, digits"),
    ("run.name", {"name": "."}, "name", "Use letters, digits"),
    ("model.mla-layers", {"model.mla_layers": [1, 5]}, "model.mla_layers", "Use [1]"),
    ("model.mla-layers", {"model.mla_layers": [1, 1]}, "model.mla_layers", "Use [1]"),
    ("model.dense-layers", {"model.num_dense_layers": 6}, "model.num_dense_layers", "at most 5"),
    ("model.top-k", {"model.moe.top_k": 16}, "model.moe.top_k", "at most 15"),
    ("model.latent", {"model.moe.latent_size": 128}, "model.moe.latent_size", "at most 127"),
    ("model.dt", {"model.kda.dt_min": 0.2}, "model.kda.dt_min", "at most 0.1"),
    ("fp8.precision", {"model.fp8": "tensorwise"}, "model.fp8", "model.precision=bf16, or model.fp8=none"),
    (
        "fp8.cpu",
        {"model.fp8": "tensorwise", "model.precision": "bf16", "device": "cpu"},
        "model.fp8",
        "device=cuda, or model.fp8=none",
    ),
    (
        "fp8.hidden",
        {"model.fp8": "blockwise", "model.precision": "bf16", "model.hidden_size": 192},
        "model.fp8",
        "model.hidden_size=128 or 256, or model.fp8=none",
    ),
    (
        "fp8.tokens",
        {"model.fp8": "blockwise", "model.precision": "bf16", "parallel.cp": 4, "cluster.ranks_per_node": 4},
        f"{AT}.context_tokens",
        "Use 512, or model.fp8=none",
    ),
    (
        "optim.min-learning-rate",
        {"optim.min_learning_rate": 1.0},
        "optim.min_learning_rate",
        "at most 0.002",
    ),
    (
        "optim.fractions",
        {"optim.schedule": "wsd", "optim.warmup_fraction": 0.5, "optim.decay_fraction": 0.75},
        "optim.decay_fraction",
        "at most 0.5",
    ),
    (
        "optim.offload",
        {"optim.offload": "cpu", "optim.optimizer": "muon"},
        "optim.offload",
        "optim.optimizer=adamw",
    ),
    (
        "optim.offload",
        {"optim.offload": "cpu", "optim.qk_clip.enabled": True},
        "optim.offload",
        "optim.qk_clip.enabled=false",
    ),
    (
        "parallel.recompute-offload",
        {"parallel.recompute_offload": True, "parallel.recompute": "selective"},
        "parallel.recompute_offload",
        "parallel.recompute=full",
    ),
    (
        "stage.peak-learning-rate",
        {f"{AT}.learning_rate": {"peak": 1e-5}},
        f"{AT}.learning_rate.peak",
        "0.0002 or more",
    ),
    (
        "stage.warmup",
        {f"{AT}.learning_rate": {"warmup_tokens": 8193}},
        f"{AT}.learning_rate.warmup_tokens",
        "at most 8192",
    ),
    (
        "guards.hang-limits",
        {"guards.hang_ceiling_seconds": 60},
        "guards.hang_ceiling_seconds",
        "120 or more",
    ),
    ("cluster.time-limit", {"cluster.time_limit_minutes": 1}, "cluster.time_limit_minutes", "Use 2 or more"),
    (
        "cluster.time-limit",
        {"cluster.time_limit_minutes": 5, "cluster.stop_margin_seconds": 630},
        "cluster.time_limit_minutes",
        "Use 11 or more",
    ),
    ("cluster.min-nodes", {"cluster.min_nodes": 2}, "cluster.min_nodes", "at most 1"),
    ("cluster.min-nodes", {"cluster.nodes": 4, "cluster.min_nodes": 2}, "cluster.min_nodes", "Use 4 or more"),
    (
        "guards.rollback",
        {
            "guards.spike": "rollback",
            "guards.rollback_steps": 8,
            "checkpoint.every_steps": 3,
            "checkpoint.keep": 3,
        },
        "checkpoint.every_steps",
        "Use 4 or more, checkpoint.keep=4 or fewer guards.rollback_steps",
    ),
    ("data.no-sources", {"data.sources": {}}, "data.sources", "data=tiny"),
    ("curriculum.empty", {"curriculum.order": []}, "curriculum.order", "Use ['only']"),
    ("curriculum.unknown-stage", {"curriculum.order": ["only", "onyl"]}, "curriculum.order", "mean only?"),
    ("curriculum.repeated-stage", {"curriculum.order": ["only", "only"]}, "curriculum.order", "once"),
    (
        "curriculum.unused-stage",
        {"curriculum.stages.more": {"context_tokens": 256, "tokens": 512, "batch_tokens": 256}},
        "curriculum.order",
        "Add more, or write",
    ),
    ("stage.mix-source", {f"{AT}.mix": {"cod": 1.0}}, f"{AT}.mix.cod", "mean code?"),
    (
        "stage.shrinking-context",
        {
            "curriculum.order": ["only", "next"],
            "curriculum.stages.next": {"context_tokens": 128, "tokens": 512, "batch_tokens": 256},
        },
        "curriculum.stages.next.context_tokens",
        "Order the stages",
    ),
    (
        "stage.context-ahead",
        {
            "curriculum.order": ["only", "next"],
            "cluster.ranks_per_node": 2,
            f"{AT}.parallel": {"cp": 2},
            "curriculum.stages.next": {"context_tokens": 511, "tokens": 1022, "batch_tokens": 1022},
        },
        "curriculum.stages.next.context_tokens",
        "Use 510 or 512, or set curriculum.eval_one_ahead=false",
    ),
    ("stage.mtp", {f"{AT}.mtp_loss_weight": 0.3}, f"{AT}.mtp_loss_weight", "model.mtp.num_layers=1"),
    ("stage.mix-sum", {f"{AT}.mix": {"code": 0.0}}, f"{AT}.mix", "positive weight"),
    ("parallel.heads-tp", {"model.num_heads": 5, "parallel.tp": 2}, "parallel.tp", "Use 1 or 5"),
    ("parallel.vocab-tp", {"model.vocab_size": 4097, "parallel.tp": 2}, "parallel.tp", "Use 1 or 17"),
    ("parallel.dense-ffn-tp", {"model.dense_ffn_size": 255, "parallel.tp": 2}, "parallel.tp", "Use 1 or 3"),
    ("parallel.shared-ffn-tp", {"model.moe.shared_ffn_size": 63, "parallel.tp": 2}, "parallel.tp", "1 or 3"),
    (
        "parallel.expert-ffn-etp",
        {"model.moe.expert_ffn_size": 63, "parallel.etp": 2},
        "parallel.etp",
        "1 or 3",
    ),
    ("parallel.experts-ep", {"model.moe.num_experts": 15, "parallel.ep": 2}, "parallel.ep", "Use 1 or 3"),
    ("parallel.ep-fold", {"parallel.ep": 4}, "parallel.ep", "Use 1 or 2 for ep"),
    ("parallel.world", {"parallel.pp": 3}, "parallel.pp", "start 3 ranks"),
    ("parallel.vp-needs-pp", {"parallel.vp": 2}, "parallel.vp", "parallel.vp=1"),
    ("parallel.layers-pp", {"model.num_layers": 1, "parallel.pp": 2}, "parallel.pp", "at most 1"),
    (
        "parallel.split-length",
        {"parallel.pp": 2, "parallel.pipeline_split": [5]},
        "parallel.pipeline_split",
        "[3, 2]",
    ),
    (
        "parallel.split-sum",
        {"parallel.pp": 2, "parallel.pipeline_split": [3, 3]},
        "parallel.pipeline_split",
        "[3, 2]",
    ),
    (
        "stage.context-shards",
        {f"{AT}.context_tokens": 255, f"{AT}.batch_tokens": 510, f"{AT}.tokens": 510, "parallel.cp": 2},
        f"{AT}.context_tokens",
        "254 or 256",
    ),
    (
        "stage.conv-halo",
        {f"{AT}.context_tokens": 4, f"{AT}.batch_tokens": 8, f"{AT}.tokens": 8, "parallel.cp": 2},
        f"{AT}.context_tokens",
        "at least 6",
    ),
    ("stage.tokens-batch", {f"{AT}.tokens": 8193}, f"{AT}.tokens", "8192 or 10240"),
    (
        "stage.batch-context",
        {f"{AT}.batch_tokens": 2000, f"{AT}.tokens": 8000},
        f"{AT}.batch_tokens",
        "1792 or 2048",
    ),
    ("stage.batch-ranks", {f"{AT}.micro_batch_sequences": 3}, f"{AT}.batch_tokens", "1536 or 2304"),
    (
        "stage.micro-batches-pp",
        {"parallel.pp": 2, f"{AT}.batch_tokens": 256},
        f"{AT}.batch_tokens",
        "at least 512",
    ),
    (
        "stage.micro-batches-vp",
        {"parallel.pp": 2, "parallel.vp": 2, f"{AT}.batch_tokens": 768, f"{AT}.tokens": 7680},
        f"{AT}.batch_tokens",
        "512 or 1024",
    ),
]


def one_stage(changes: dict[str, Any]) -> list[Any]:
    """Problems of the one-stage run with changes; pipelines and tensor parallelism get ranks of their own."""
    ranks = {"cluster.ranks_per_node": 2} if _needs_two(changes) else {}
    return check(four_stage_run({**ONE_STAGE, **ranks, **changes}))


def _needs_two(changes: dict[str, Any]) -> bool:
    degrees = {changes.get(f"parallel.{name}") for name in ("tp", "pp", "cp", "ep", "etp")}
    return bool(degrees & {2, 4})


def test_the_base_is_sound() -> None:
    assert check(four_stage_run()) == []
    assert one_stage({}) == []


@pytest.mark.parametrize(
    ("id", "changes", "key", "fix"), BROKEN, ids=[f"{row[0]}-{index}" for index, row in enumerate(BROKEN)]
)
def test_rule_fires_once(id: str, changes: dict[str, Any], key: str, fix: str) -> None:
    problems = one_stage(changes)
    assert [(problem.id, problem.key) for problem in problems] == [(id, key)]
    assert fix in problems[0].fix


def test_the_world_of_a_stage_names_the_stages_own_degrees() -> None:
    problems = check(four_stage_run({"parallel.pp": 2}))
    (problem,) = [problem for problem in problems if problem.id == "parallel.world"]
    assert problem.key == "parallel.pp"
    assert "times parallel.tp = 1 and curriculum.stages.s8192.parallel.cp = 2 must" in problem.rule


def test_a_stage_that_is_not_evaluated_one_ahead_may_have_any_next_context() -> None:
    (row,) = [row for row in BROKEN if row[0] == "stage.context-ahead"]
    assert one_stage({**row[1], "curriculum.eval_one_ahead": False}) == []
    assert one_stage({**row[1], "data.heldout": {}}) == []


def test_every_rule_is_tested() -> None:
    folder = Path(rules_module.__file__).parent
    files = ("rules.py", "context_rules.py", "layout_rules.py", "fp8_rules.py")
    text = "".join((folder / name).read_text() for name in files)
    groups = "run|model|fp8|optim|data|curriculum|stage|parallel|guards|cluster"
    written = set(re.findall(rf'"((?:{groups})\.[a-z-]+)"', text))
    written |= {f"parallel.{name}" for name in re.findall(r'\("([a-z-]+-e?tp)"', text)}
    keys = {key for key in written if follow(key) is not None}
    assert written - keys == {row[0] for row in BROKEN} - keys
    assert {"run.name", "guards.rollback"} <= {row[0] for row in BROKEN}


@pytest.mark.parametrize("changes", [{"guards.spike": "warn"}, {"checkpoint.every_steps": 4},
                                     {"checkpoint.keep": 4}, {"guards.rollback_steps": 7}])  # fmt: skip
def test_a_rollback_that_has_its_checkpoint_is_accepted(changes: dict[str, Any]) -> None:
    (row,) = [row for row in BROKEN if row[0] == "guards.rollback"]
    assert one_stage({**row[1], **changes}) == []


def test_a_rollback_needs_checkpoints_within_stages() -> None:
    (row,) = [row for row in BROKEN if row[0] == "guards.rollback"]
    (problem,) = one_stage({**row[1], "checkpoint.every_steps": 0})
    assert "saves at the end of a stage only" in str(problem)
    assert "Use 4 or more" in str(problem)


@pytest.mark.parametrize("text", ["", " "])
@pytest.mark.parametrize(
    ("changes", "key", "fix"),
    [
        ({"name": ...}, "name", "Name the run"),
        ({"dir": ...}, "dir", "Give a folder"),
        ({"data.tokenizer": ...}, "data.tokenizer", "null to compare none"),
        ({"data.sources.code.path": ...}, "data.sources.code.path", "corpus folder"),
        ({"data.heldout": {"a": ...}}, "data.heldout.a", "corpus folder"),
        ({"checkpoint.load_from": ...}, "checkpoint.load_from", "null to begin with new weights"),
        ({"monitor.wandb_project": ...}, "monitor.wandb_project", "Name the project"),
        ({"optim.muon.adamw": [...]}, "optim.muon.adamw.0", "take the entry out"),
    ],
)
def test_an_empty_text_is_refused_with_its_key(
    changes: dict[str, Any], key: str, fix: str, text: str
) -> None:
    def written(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: written(entry) for name, entry in value.items()}
        return [text] if isinstance(value, list) else text

    (problem,) = one_stage(written(changes))
    assert (problem.id, problem.key, problem.rule) == ("empty", key, "must not be empty")
    assert fix in problem.fix


def test_every_text_says_whether_it_may_be_empty() -> None:
    texts = {key for key in flattened() if without_none(follow(key))[0] is str}
    texts |= {f"{key}.*" for key in flattened() if without_none(follow(key))[0] == list[str]}
    assert texts == set(FILLED)
    assert one_stage({"cluster.partition": "", "cluster.account": ""}) == []


def test_every_number_has_a_range() -> None:
    numbers = {key for key in flattened() if without_none(follow(key))[0] in (int, float)}
    numbers |= {f"{key}.*" for key in flattened() if without_none(follow(key))[0] == list[int]}
    assert numbers == set(RANGES)


def test_same_problem_in_all_stages_is_said_once() -> None:
    problems = check(
        four_stage_run({"model.vocab_size": 4097, "parallel.tp": 2, "cluster.ranks_per_node": 4})
    )
    assert [problem.id for problem in problems].count("parallel.vocab-tp") == 1


def test_stage_is_named_when_the_stage_sets_the_degree() -> None:
    problems = check(four_stage_run({"curriculum.stages.s8192.parallel.ep": 3}))
    assert "curriculum.stages.s8192.parallel.ep" in {problem.key for problem in problems}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("parallel.tp", 0), ("parallel.tp", -2), ("model.num_heads", 0), ("model.vocab_size", 0),
        ("curriculum.stages.s256.batch_tokens", 0), ("curriculum.stages.s256.context_tokens", -256),
        ("curriculum.stages.s256.micro_batch_sequences", 0), ("model.kda.gate_lower_bound", -5.5),
        ("model.kda.gate_lower_bound", 0.0), ("model.mtp.num_layers", 2), ("checkpoint.keep", 1),
        ("optim.learning_rate", 0.0), ("optim.beta2", 1.0), ("optim.warmup_fraction", 1.5),
        ("model.attn_res.block_layers", 0), ("cluster.nodes", 0), ("parallel.pipeline_split", [5, 0]),
        ("curriculum.stages.s256.mix", {"code": -1.0}), ("model.mla_layers", [-1]), ("seed", -1),
        ("model.num_layers", 10**23), ("model.vocab_size", 10**18), ("cluster.nodes", 10**12),
        ("parallel.pp", 2**31), ("optim.eps", 1e-60), ("optim.learning_rate", 1e300),
        ("model.init_std", 1e300), ("model.situ.gate_cap", 1e300), ("model.kda.dt_max", 1e300),
        ("model.norm_eps", 1e300), ("model.moe.router.quantile.range", 1e-300),
        ("model.kda.gate_lower_bound", -1e-300), ("optim.beta2", 1 - 1e-12),
        ("curriculum.stages.s256.tokens", 2**62), ("data.sources.code.max_epochs", 1e300),
        ("curriculum.stages.s256.mix", {"prose": 1e308, "code": 1.0}),
        ("cluster.restart_delay_seconds", 1e300), ("cluster.device_memory_gib", 1e300),
    ],
)  # fmt: skip
def test_number_outside_its_range_is_one_problem(key: str, value: Any) -> None:
    """Rules that divide by it neither crash nor pile up."""
    problems = check(four_stage_run({key: value}))
    assert [problem.id for problem in problems] == ["range"]
    assert problems[0].key.startswith(key)
    assert problems[0].fix


def test_no_number_is_one_that_fp32_does_not_hold() -> None:
    """Counts are whole numbers; of the others some bounds are only compared with, on the host."""
    compared = "alarms|max_epochs|spike_score|straggler_ratio"
    for key, allowed in RANGES.items():
        if without_none(follow(key))[0] is float and not re.search(compared, key):
            assert 2.0**-126 <= abs(allowed.low) <= 2.0**127 or (
                allowed.low == 0 and not allowed.without_low
            ), key
            assert 2.0**-126 <= abs(allowed.high) <= 2.0**127, key


def test_weights_that_together_are_more_than_a_number_are_two_problems() -> None:
    problems = check(four_stage_run({"curriculum.stages.s256.mix": {"prose": 1e308, "code": 1e308}}))
    assert [problem.id for problem in problems] == ["range", "range"]


def test_wrong_keys_silence_what_reads_them() -> None:
    run = four_stage_run({"model.vocab_size": 4097, "parallel.tp": 2, "cluster.ranks_per_node": 4})
    assert "parallel.vocab-tp" in {problem.id for problem in check(run)}
    for wrong in ("model.vocab_size", "model", "parallel.tp"):
        assert "parallel.vocab-tp" not in {p.id for p in check(run, wrong_keys=frozenset({wrong}))}


def test_check_leaves_the_run_alone() -> None:
    run = four_stage_run({"parallel.tp": 0})
    check(run)
    assert run.parallel.tp == 0


def test_all_kda_model_needs_no_whole_heads_for_context() -> None:
    changes = {"model.mla_layers": [], "cluster.ranks_per_node": 8, "parallel.cp": 8}
    assert one_stage({**changes, f"{AT}.context_tokens": 256}) == []
