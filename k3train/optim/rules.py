"""Which update rule each parameter gets: one table, by kind of module. No torch.

Muon is for matrices between hidden representations (k3 report 2.5, 3.3; Moonlight, arXiv:2502.16982): one
block a head for q, k and v, each expert by itself, every other matrix whole. What is no such matrix takes
AdamW: tables of vocabulary or experts, vectors, convolutions, and all that stays fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase

from k3train.config import schema
from k3train.config.keys import closest_word
from k3train.config.problems import ConfigError, ConfigProblem
from k3train.plan.counts import kda_layers, mla_layers
from k3train.plan.parameters import Parameter, local_name, parameters


class Rule(Enum):
    """What a parameter is to the optimizer."""

    adamw = "AdamW"
    matrix = "Muon, one matrix"
    heads = "Muon, per head"
    experts = "Muon, per expert"


_A, _M, _H, _E = Rule.adamw, Rule.matrix, Rule.heads, Rule.experts
_ATTENTION_OUT = {"attention.g_proj.weight": _M, "attention.o_proj.weight": _M}
_FFN = {"ffn.gate_proj.weight": _M, "ffn.up_proj.weight": _M, "ffn.down_proj.weight": _M}

TABLE: dict[str, dict[str, Rule]] = {
    "ends": {
        "embedding.weight": _A,
        "output_mix.query": _A,
        "output_mix.norm_weight": _A,
        "final_norm.weight": _A,
        "output_head.weight": _A,
    },
    "layer": {
        "attention_mix.query": _A,
        "attention_mix.norm_weight": _A,
        "attention_norm.weight": _A,
        "ffn_mix.query": _A,
        "ffn_mix.norm_weight": _A,
        "ffn_norm.weight": _A,
    },
    "kda": {
        **dict.fromkeys((f"attention.{name}_proj.weight" for name in "qkv"), _H),
        **_ATTENTION_OUT,
        "attention.b_proj.weight": _M,
        "attention.f_a.weight": _M,
        "attention.f_b.weight": _M,
        **dict.fromkeys((f"attention.{name}_conv" for name in "qkv"), _A),
        "attention.A_log": _A,
        "attention.dt_bias": _A,
        "attention.o_norm": _A,
    },
    "mla": {
        "attention.q_a.weight": _M,
        "attention.q_a_norm.weight": _A,
        "attention.q_b.weight": _H,
        "attention.kv_a.weight": _M,
        "attention.kv_a_norm.weight": _A,
        "attention.kv_b.weight": _H,
        **_ATTENTION_OUT,
    },
    "dense": _FFN,
    "moe": {
        "ffn.router.weight": _A,
        "ffn.latent_down.weight": _M,
        "ffn.latent_up.weight": _M,
        "ffn.experts.gate": _E,
        "ffn.experts.up": _E,
        "ffn.experts.down": _E,
    },
    "latent_norm": {"ffn.latent_norm.weight": _A},
    "shared": {name.replace("ffn.", "ffn.shared."): rule for name, rule in _FFN.items()},
    "mtp": {
        "hidden_norm.weight": _A,
        "embedding_norm.weight": _A,
        "projection.weight": _M,
    },
}
"""Rule by kind of module and by name within its layer."""

_RULES = {name: rule for kind in TABLE.values() for name, rule in kind.items()}


@dataclass(frozen=True, slots=True)
class Assignment:
    """A parameter and its rule."""

    parameter: Parameter
    rule: Rule
    blocks: tuple[int, ...] = ()
    """For ``heads``: rows of each matrix that one head's rows are cut into."""


def assignments(model: schema.Model, optim: schema.Optim) -> dict[str, Assignment]:
    """The rule of every parameter of the whole model, by name.

    Raises ConfigError when a parameter has no rule, when a rule of a kind of module that the model has fits
    none of its parameters, or when an entry of ``optim.muon.adamw`` names no matrix that would take Muon.
    """
    known = list(parameters(model))
    problems = [*_table_problems(model, known)]
    if not problems and optim.optimizer is schema.Optimizer.muon:
        problems = [*_exception_problems(optim.muon.adamw, known)]
    if problems:
        raise ConfigError(problems)
    blocks = head_blocks(model)
    found: dict[str, Assignment] = {}
    for parameter in known:
        rule = _rule(parameter, optim)
        own = blocks[parameter.local_name] if rule is Rule.heads else ()
        found[parameter.name] = Assignment(parameter, rule, own)
    return found


def head_blocks(model: schema.Model) -> dict[str, tuple[int, ...]]:
    """Rows of one head in each projection that is split by heads, in the order in which they are stored.

    A head of MLA's kv_b holds its key's rows, then its value's: two matrices. Its query's rows meet the key's
    as one vector, so they are one matrix.
    """
    mla = model.mla
    return {
        **dict.fromkeys((f"attention.{name}_proj.weight" for name in "qkv"), (model.kda.head_dim,)),
        "attention.q_b.weight": (mla.qk_head_dim + mla.qk_shared_head_dim,),
        "attention.kv_b.weight": (mla.qk_head_dim, mla.v_head_dim),
    }


def _rule(parameter: Parameter, optim: schema.Optim) -> Rule:
    rule = _RULES[parameter.local_name]
    if optim.optimizer is schema.Optimizer.adamw or any(_named(parameter, p) for p in optim.muon.adamw):
        return Rule.adamw
    return Rule.matrix if rule is Rule.heads and not optim.muon.per_head else rule


def _named(parameter: Parameter, pattern: str) -> bool:
    return fnmatchcase(parameter.name, pattern) or fnmatchcase(parameter.local_name, pattern)


def _table_problems(model: schema.Model, known: list[Parameter]) -> Iterator[ConfigProblem]:
    names = {parameter.local_name: parameter.name for parameter in known}
    fix = "Add it to TABLE in k3train/optim/rules.py, or correct it there"
    for local, name in names.items():
        if local not in _RULES:
            yield ConfigProblem("", None, f"the parameter {name} has no optimizer rule", fix, "optim.no-rule")
    for kind in _kinds(model):
        for local in TABLE[kind].keys() - names.keys():
            what = f"the optimizer rule for {local} of {kind} fits no parameter"
            yield ConfigProblem("", None, what, fix, "optim.idle-rule")


def _kinds(model: schema.Model) -> Iterator[str]:
    """Kinds of modules that the model has."""
    mtp = model.mtp.num_layers > 0
    moe = mtp or model.num_dense_layers < model.num_layers
    present = {
        "ends": True,
        "layer": True,
        "kda": bool(kda_layers(model)),
        "mla": mtp or bool(mla_layers(model)),
        "dense": model.num_dense_layers > 0,
        "moe": moe,
        "latent_norm": moe and model.moe.latent_norm,
        "shared": moe and model.moe.num_shared_experts > 0,
        "mtp": mtp,
    }
    yield from (kind for kind in TABLE if present[kind])


def _exception_problems(patterns: list[str], known: list[Parameter]) -> Iterator[ConfigProblem]:
    matrices = [p for p in known if _RULES[p.local_name] is not Rule.adamw]
    for pattern in patterns:
        if not any(_named(parameter, pattern) for parameter in matrices):
            meant = closest_word(pattern, {local_name(p.name) for p in matrices})
            fix = f"Did you mean {meant}?" if meant else "See the names in `k3train show optim`"
            rule = "names no matrix that would take Muon"
            yield ConfigProblem("optim.muon.adamw", pattern, rule, fix, "optim.unknown-matrix")
