"""Recomputation policies on the whole model: same numbers, same router counts, less memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from k3train.config.schema import Parallel, Recompute
from k3train.model import layer
from k3train.model.mla import GatedMla
from k3train.parallel.groups import stop_groups
from k3train.plan import recompute
from k3train.plan.counts import kda_layers, mla_layers
from k3train.router.router import K3Router
from tests import model_step
from tests.model_step import make_micro
from tests.parity import test_model
from tests.parity.test_model import randomise
from tests.ranks import run_ranks
from tests.unit.kernels.test_recompute import Kept

MODEL = replace(test_model.MODEL, init_std=0.03)
"""Larger weights would let each layer amplify rounding."""
NONE, SELECTIVE, FULL = Recompute.none, Recompute.selective, Recompute.full
POLICIES: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute": SELECTIVE},
    "full": {"recompute": FULL},
    "kda selective": {"recompute_kda": SELECTIVE},
    "mla selective": {"recompute_mla": SELECTIVE},
    "moe selective": {"recompute_moe": SELECTIVE},
    "dense selective": {"recompute_dense": SELECTIVE},
    "kda full": {"recompute_kda": FULL},
    "mla full": {"recompute_mla": FULL},
    "moe full": {"recompute_moe": FULL},
    "dense full": {"recompute_dense": FULL},
    "full but moe": {"recompute": FULL, "recompute_moe": SELECTIVE},
    "full in pieces": {"recompute": FULL},
    "full in pieces of heads": {"recompute": FULL},
    "full on the host": {"recompute": FULL, "recompute_offload": True},
    "halves full on the host": {"recompute_kda": FULL, "recompute_moe": FULL, "recompute_offload": True},
}
MICRO = make_micro((0, 1, 17, 36, 40), MODEL.vocab_size, 0)


def _policies(rank: int, degrees: dict[str, int], names: list[str]) -> dict[str, dict[str, Any]]:
    """What one forward and backward pass gives under each policy, on this rank."""
    found = {}
    for name in names:
        chunks, groups = model_step.build(MODEL, {**degrees, **POLICIES[name]}, randomise)
        (chunk,) = chunks
        layer.PIECE_TOKENS = 9 if name == "full in pieces" else 65536
        recompute.HEAD_TOKENS = 40 if "heads" in name else 2**21
        attentions = [module for module in chunk.modules() if isinstance(module, GatedMla)]
        for module in attentions:
            module.track_logits()
        fed: list[int] = []
        for name_of, module in chunk.named_modules():
            if name_of.endswith(".ffn"):
                module.register_forward_pre_hook(lambda _, args, fed=fed: fed.append(args[0].shape[0]))
        place = model_step.packing(MICRO, groups)
        part = slice(place.start, place.stop)
        before = torch.get_rng_state()
        with Kept() as kept:
            losses = chunk(
                MICRO.tokens[None, part],
                place,
                labels=MICRO.labels[None, part],
                labels_mtp=MICRO.labels_mtp[None, part],
            )
        size = kept.bytes()
        losses.sum().backward()
        routers = [module for module in chunk.modules() if isinstance(module, K3Router)]
        found[name] = {
            "bytes": size,
            "fed": fed,
            "values": {
                "loss": losses.detach(),
                "rng": torch.get_rng_state() == before,
                **{key: p.grad for key, p in chunk.named_parameters()},
                **{f"logits {i}": module.max_logits for i, module in enumerate(attentions)},
                **{f"loads {i}": router.loads.clone() for i, router in enumerate(routers)},
                **{f"counts {i}": router.rule.statistics().clone() for i, router in enumerate(routers)},
            },
        }
        stop_groups()
    return found


@pytest.fixture(scope="module")
def one_rank() -> dict[str, dict[str, Any]]:
    return run_ranks(1, _policies, {}, list(POLICIES))[0]


@pytest.mark.parametrize("name", list(POLICIES)[1:])
def test_no_policy_changes_a_number(name: str, one_rank: dict[str, dict[str, Any]]) -> None:
    _same(name, one_rank)


@pytest.mark.slow
def test_no_policy_changes_a_number_on_four_ranks() -> None:
    names = ["none", "selective", "full", "full but moe"]
    for found in run_ranks(4, _policies, {"tp": 2, "cp": 2, "ep": 2}, names):
        for name in names:
            _same(name, found)
        size = {name: each["bytes"] for name, each in found.items()}
        assert size["full"] < size["selective"] < size["none"]


def _same(name: str, found: dict[str, dict[str, Any]]) -> None:
    """Bit for bit, but full recomputation adds up the gradients of a layer's sources in another order: then
    the whole gradient within 1e-6, and each tensor within 1e-5, since sums over all tokens may cancel. In
    pieces, products of other sizes may also round otherwise, and what some heads contribute is summed up
    after their products: the loss moves too, and the gradient by 2e-6 and 5e-6 (in fp64 by 1e-14).
    """
    got, want = found[name]["values"], found["none"]["values"]
    assert got.keys() == want.keys()
    assert bool(got["rng"].all())
    exact = "full" not in name
    off = whole = 0.0
    for key, value in want.items():
        if "pieces" in name and key.startswith(("loss", "logits")):
            torch.testing.assert_close(got[key], value, rtol=5e-6, atol=0)
        elif exact or key.startswith(("loss", "logits", "rng", "loads", "counts")):
            assert torch.equal(got[key], value), key
        else:
            error, size = float((got[key] - value).norm()), float(value.norm())
            assert error <= 1e-5 * size, key
            off, whole = off + error**2, whole + size**2
    assert off <= (5e-6 if "heads" in name else 2e-6 if "pieces" in name else 1e-6) ** 2 * whole


def test_feed_forwards_in_pieces_see_no_more_at_once(one_rank: dict[str, dict[str, Any]]) -> None:
    tokens, layers = MICRO.borders[-1], MODEL.num_layers + 1  # MTP has one too
    assert one_rank["full"]["fed"] == [tokens] * (2 * layers)
    # the first pass, the layer's second, and each piece's own
    pieces = one_rank["full in pieces"]["fed"]
    assert max(pieces) == 9
    assert sum(pieces) == 3 * layers * tokens


def test_each_policy_keeps_less(one_rank: dict[str, dict[str, Any]]) -> None:
    size = {name: each["bytes"] for name, each in one_rank.items()}
    print({name: f"{100 * each / size['none']:.0f} %" for name, each in size.items()})
    for kind in ("kda", "mla", "moe", "dense"):
        assert size[f"{kind} full"] < size[f"{kind} selective"] < size["none"], kind
    assert size["full"] < size["full but moe"] < size["selective"] < size["none"]
    # any policy drops the logits of both heads
    logits = 2 * 4 * MICRO.borders[-1] * MODEL.vocab_size
    for policy in ("selective", "full"):
        saved = [size["none"] - size[f"{kind} {policy}"] for kind in ("kda", "mla", "moe", "dense")]
        assert size["none"] - size[policy] >= sum(saved) - 3 * logits


def test_selective_drops_what_it_names(one_rank: dict[str, dict[str, Any]]) -> None:
    """Fp32 numbers a token that selective recomputation must not keep: the least that it saves."""
    mla, moe, d = MODEL.mla, MODEL.moe, MODEL.hidden_size
    width, kdas, mlas = (
        MODEL.num_heads * MODEL.kda.head_dim,
        len(kda_layers(MODEL)),
        len(mla_layers(MODEL)) + 1,
    )
    moes = MODEL.num_layers - MODEL.num_dense_layers + 1  # MTP has both
    key = mla.qk_head_dim + mla.qk_shared_head_dim
    least = {
        "kda": kdas * (3 * width + width + width),  # convolutions, decays, gated norm
        "mla": mlas * MODEL.num_heads * (2 * key + 2 * mla.v_head_dim),  # q, k, v, gated output
        "moe": moes * (moe.num_shared_experts * moe.shared_ffn_size + moe.top_k * moe.expert_ffn_size),
        "dense": MODEL.num_dense_layers * MODEL.dense_ffn_size,
    }
    norms = {"kda": kdas, "mla": mlas, "moe": moes, "dense": MODEL.num_dense_layers}
    for kind, numbers in least.items():
        saved = one_rank["none"]["bytes"] - one_rank[f"{kind} selective"]["bytes"]
        assert saved >= 4 * MICRO.borders[-1] * (numbers + norms[kind] * d), kind


def test_a_kind_without_a_policy_follows_the_common_one() -> None:
    plan = recompute.recompute_plan(Parallel(recompute=FULL, recompute_moe=NONE))
    assert (plan.kda, plan.mla, plan.dense, plan.moe) == (FULL, FULL, FULL, NONE)
    assert plan.of_layer(MODEL, 0) == (FULL, FULL)
    assert plan.of_layer(MODEL, 1) == (FULL, NONE)
