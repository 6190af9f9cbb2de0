"""Counts against Kimi K3's released checkpoint and the report, and against hand counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from k3train.config.compose import compose
from k3train.config.schema import Model, Mtp, Router, RouterInput
from k3train.plan.counts import (
    count_parameters,
    expert_parameters,
    is_mla,
    kda_layers,
    kda_parameters,
    mla_layers,
    mla_parameters,
    train_flops_per_token,
)


@pytest.fixture(scope="module")
def k3() -> Model:
    return compose(["model=k3"]).model


def test_total_of_k3_is_exact(k3: Model) -> None:
    assert count_parameters(k3).total == 2_779_484_476_000


def test_active_of_k3_is_the_reports(k3: Model) -> None:
    assert count_parameters(k3).active == pytest.approx(104.19e9, rel=1e-4)


def test_components_add_up(k3: Model) -> None:
    counts = count_parameters(k3)
    assert sum(part.total for part in counts.components.values()) == counts.total
    assert sum(part.active for part in counts.components.values()) == counts.active


@pytest.mark.parametrize(
    ("name", "billions"),
    [("routed_experts", 2722.74), ("shared_experts", 12.16), ("latent", 4.73), ("router", 0.59),
     ("kda", 30.62), ("mla", 5.57), ("dense_ffn", 0.727), ("embedding", 1.174), ("head", 1.174)],
)  # fmt: skip
def test_components_of_k3(k3: Model, name: str, billions: float) -> None:
    assert count_parameters(k3).components[name].total / 1e9 == pytest.approx(billions, rel=2e-3)


def test_sublayers_of_k3(k3: Model) -> None:
    assert kda_parameters(k3) / 1e6 == pytest.approx(443.74, abs=0.01)
    assert mla_parameters(k3) / 1e6 == pytest.approx(232.20, abs=0.01)
    assert expert_parameters(k3) == 33_030_144


def test_layers_of_k3(k3: Model) -> None:
    assert mla_layers(k3) == [*range(3, 92, 4), 92], "the last two layers are both MLA"
    assert len(kda_layers(k3)) == 69


def test_explicit_layers_replace_the_rule() -> None:
    model = Model(num_layers=4, mla_layers=[0])
    assert [is_mla(model, layer) for layer in range(4)] == [True, False, False, False]


def test_proxy_is_the_measured_shape() -> None:
    model = compose(["model=k3_proxy"]).model
    assert count_parameters(model).total / 1e9 == pytest.approx(4.43, abs=0.005)
    assert [layer + 1 for layer in mla_layers(model)] == [4, 8, 11, 12]


@pytest.mark.parametrize(
    ("context", "gflops"), [(8192, 646), (65_536, 773), (262_144, 1207), (1_048_576, 2947)]
)
def test_flops_of_k3(k3: Model, context: int, gflops: float) -> None:
    assert train_flops_per_token(k3, context) / 1e9 == pytest.approx(gflops, rel=1e-3)


def test_flops_at_no_context_are_six_per_active_weight(k3: Model) -> None:
    """Without attention over a context, only KDA's own state is more than 6 FLOPs an active parameter."""
    per_weight = train_flops_per_token(k3, 0) / count_parameters(k3).active
    assert 6.0 < per_weight < 6.05


def test_a_router_on_the_latent_is_as_wide_as_that(k3: Model) -> None:
    moe = replace(k3.moe, router=Router(input=RouterInput.latent))
    latent = replace(k3, moe=moe)
    saved = 92 * 896 * (7168 - 3584)
    assert count_parameters(k3).total - count_parameters(latent).total == saved
    assert train_flops_per_token(k3, 0) - train_flops_per_token(latent, 0) == pytest.approx(6 * saved)


def test_mtp_is_counted() -> None:
    off = Model()
    on = replace(off, mtp=Mtp(num_layers=1))
    part = count_parameters(on).components["mtp"]
    d = off.hidden_size
    experts = off.moe.num_experts * expert_parameters(off)
    shared = 3 * d * off.moe.shared_ffn_size
    latent = 2 * d * off.moe.latent_size + off.moe.latent_size
    router = (d + 1) * off.moe.num_experts
    assert part.total == mla_parameters(off) + experts + shared + latent + router + 2 * d * d + 5 * d
    assert count_parameters(on).total == count_parameters(off).total + part.total
    head = 2 * off.vocab_size * d
    assert train_flops_per_token(on, 64) > train_flops_per_token(off, 64) + 3 * head
