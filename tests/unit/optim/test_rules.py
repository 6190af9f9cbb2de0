"""Which rule each parameter gets, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from k3train.config import schema
from k3train.config.compose import compose
from k3train.config.problems import ConfigError
from k3train.optim import rules
from k3train.optim.decay import is_decayed
from k3train.optim.rules import Rule, assignments
from k3train.plan.parameters import Parameter
from tests.muon_reference import ADAMW, UNDECAYED
from tests.parity.test_model import MODEL

MUON = schema.Optim(optimizer=schema.Optimizer.muon)


def with_muon(**changes: object) -> schema.Optim:
    return replace(MUON, muon=schema.Muon(**changes))  # type: ignore[arg-type]


def test_every_parameter_has_the_rule_of_its_kind() -> None:
    found = assignments(MODEL, MUON)
    for name, assigned in found.items():
        if any(part in name for part in ADAMW):
            assert assigned.rule is Rule.adamw, name
        elif ".experts." in name:
            assert assigned.rule is Rule.experts, name
        elif name.endswith(tuple(f"{each}.weight" for each in ("q_proj", "k_proj", "v_proj", "q_b", "kv_b"))):
            assert assigned.rule is Rule.heads, name
        else:
            assert assigned.rule is Rule.matrix, name
        assert is_decayed(name, assigned.parameter) is not any(part in name for part in UNDECAYED), name
    assert {a.rule for a in found.values()} == set(Rule)
    assert found["layers.3.attention.kv_b.weight"].blocks == (5, 7)
    assert found["layers.3.attention.q_b.weight"].blocks == (8,)
    assert found["layers.0.attention.v_proj.weight"].blocks == (8,)


def test_k3_s_head_blocks() -> None:
    model = compose(["model=k3"]).model
    found = assignments(model, MUON)
    for name, rows, blocks in (
        ("layers.0.attention.q_proj.weight", 12288, (128,)),
        ("layers.92.attention.q_b.weight", 18432, (192,)),
        ("layers.92.attention.kv_b.weight", 24576, (128, 128)),
    ):
        assert found[name].parameter.shape[0] == rows
        assert found[name].blocks == blocks
        assert rows == model.num_heads * sum(blocks)


def test_options() -> None:
    whole = assignments(MODEL, with_muon(per_head=False))
    assert whole["layers.0.attention.q_proj.weight"].rule is Rule.matrix
    some = assignments(MODEL, with_muon(adamw=["attention.o_proj.weight", "layers.3.*", "mtp.*"]))
    assert some["layers.0.attention.o_proj.weight"].rule is Rule.adamw
    assert some["layers.0.attention.q_proj.weight"].rule is Rule.heads
    assert {a.rule for name, a in some.items() if name.startswith(("layers.3.", "mtp."))} == {Rule.adamw}
    assert {a.rule for a in assignments(MODEL, schema.Optim()).values()} == {Rule.adamw}


def problems(model: schema.Model, optim: schema.Optim) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        assignments(model, optim)
    return [problem.id for problem in caught.value.problems]


def test_names_that_match_nothing_are_refused() -> None:
    wrong = with_muon(adamw=["attention.q_porj.weight", "embedding.weight", "ffn.experts.*"])
    with pytest.raises(ConfigError, match=r"Did you mean attention\.q_proj\.weight\?") as caught:
        assignments(MODEL, wrong)
    assert [problem.value for problem in caught.value.problems] == wrong.muon.adamw[:2]
    kda_only = replace(MODEL, mla_layers=[], mtp=schema.Mtp())
    assert problems(kda_only, with_muon(adamw=["attention.kv_b.weight"])) == ["optim.unknown-matrix"]
    assignments(kda_only, MUON)


def test_a_parameter_without_rule_and_a_rule_without_parameter_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed = [*rules.parameters(MODEL), Parameter("layers.0.attention.extra.weight", (4, 4))]
    monkeypatch.setattr(rules, "parameters", lambda model: iter(listed))
    assert problems(MODEL, MUON) == ["optim.no-rule"]
    monkeypatch.setattr(rules, "parameters", lambda model: (p for p in listed[:-1] if "f_a" not in p.name))
    assert problems(MODEL, MUON) == ["optim.idle-rule"]
