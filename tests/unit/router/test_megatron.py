"""The router in a model that is not k3train's: settings, what it refuses, and the end of a step."""

from __future__ import annotations

import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from k3train.config import schema
from k3train.config.schema import Quantile, Router
from k3train.parallel.groups import start_groups
from k3train.parallel.layout import make_layout
from k3train.router import megatron
from k3train.router.megatron import MegatronRouter
from k3train.router.update import set_biases, start_update, update_biases
from tests.ranks import run_ranks


def make_config(**options: Any) -> TransformerConfig:
    usual = {"num_layers": 3, "hidden_size": 16, "num_attention_heads": 2, "num_moe_experts": 8}
    usual |= {"moe_router_topk": 2, "calculate_per_token_loss": True}
    return TransformerConfig(**usual | options)


def make_router(settings: Router | None = None, mtp: bool = False, **options: Any) -> MegatronRouter:
    model_parallel_cuda_manual_seed(7, tp_rank=0, ep_rank=0, etp_rank=0, force_reset_rng=True)
    router = MegatronRouter(make_config(**options), None, mtp, settings=settings)
    router.set_layer_number(1)
    return router


def route(router: MegatronRouter, tokens: int = 40, seed: int = 1) -> None:
    g = torch.Generator().manual_seed(seed)
    router(torch.randn(tokens // 4, 4, 16, generator=g))


def test_words_of_settings_are_read_as_on_the_command_line():
    assert make_router(Router(rule="sign")).settings.rule is schema.RouterRule.sign  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (Router(rule="quantlie"), "model.moe.router.rule = quantlie must be one of .* Did you mean quantile"),  # type: ignore[arg-type]
        (Router(quantile=Quantile(bins=-5)), "quantile.bins = -5 must be at least 2. Use 2 or more"),
        (Router(quantile=Quantile(bins=10**9)), "quantile.bins = 1000000000 must be at most 65536"),
        (Router(quantile=Quantile(bins=1)), "quantile.bins = 1 must be at least 2. Use 2 or more"),
        (Router(quantile=Quantile(window=0)), "quantile.window = 0 must be at least 1. Use 1 or more"),
        (Router(quantile=Quantile(strength=2.0)), "quantile.strength = 2.0 must be at most 1"),
        (Router(quantile=Quantile(range=-1.0)), "quantile.range = -1.0 must be at least 1e-06"),
        (Router(input=schema.RouterInput.latent), "router.input = latent, .* use hidden"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: Router, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make_router(settings)


@pytest.mark.parametrize(("top_k", "rule"), [(9, "sign"), (9, "none"), (8, "quantile")])
def test_more_choices_than_experts_are_refused(top_k: int, rule: str) -> None:
    with pytest.raises(
        ValueError, match=rf"model.moe.top_k={top_k} \(moe_router_topk\) .* model.moe.num_exp"
    ):
        make_router(Router(rule=schema.RouterRule[rule]), moe_router_topk=top_k)


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"moe_router_topk": 0}, r"top_k=0 \(moe_router_topk\) must be a whole number from 1 to .*experts=8"),
        ({"moe_router_topk": -1}, r"top_k=-1 \(moe_router_topk\) must be a whole number from 1 to"),
        ({"moe_router_topk": None}, r"top_k=None \(moe_router_topk\) must be a whole number from 1 to"),
        ({"num_moe_experts": None}, "num_moe_experts is None: set the number of experts"),
        ({"moe_router_dtype": "bf16"}, "moe_router_dtype=bf16 must be fp32 or fp64, or None"),
        ({"moe_router_topk_scaling_factor": 0.0}, "topk_scaling_factor=0.0 must be a number above 0"),
        (
            {"moe_router_topk_scaling_factor": float("nan")},
            "factor=nan must be a number above 0",
        ),
    ],
)
def test_config_values_that_cannot_be_are_refused(option: dict[str, Any], told: str) -> None:
    config = make_config()
    for name, value in option.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=told):
        MegatronRouter(config)


def test_inputs_and_masks_of_another_shape_are_refused() -> None:
    router, x = make_router(), torch.randn(6, 2, 16)
    with pytest.raises(ValueError, match=r"padding_mask has shape \(2, 6\): .* \[s, b\] = \[6, 2\]"):
        router(x, torch.zeros(2, 6, dtype=torch.bool))
    for wrong in (x[..., :8], x[0]):
        with pytest.raises(ValueError, match=r"input has shape .*: the router needs \[s, b, 16\]"):
            router(wrong)
    router(x, torch.tensor([[False, True]] * 6))
    assert update_biases([router])[1]["tokens"] == 6


@pytest.mark.parametrize("rule", schema.RouterRule)
@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_no_tokens_are_routed_like_any(rule: schema.RouterRule, shape: tuple[int, int]) -> None:
    router = make_router(Router(rule=rule))
    x = torch.zeros(*shape, 16, requires_grad=True)
    weights, chosen = router(x, torch.zeros(shape, dtype=torch.bool))
    assert weights.shape == chosen.shape == (0, 8)
    weights.sum().backward()
    assert x.grad is not None
    assert router.weight.grad is not None
    assert not router.weight.grad.any()
    assert update_biases([router])[1]["tokens"] == 0
    assert not router.bias.any()


def update_beside_an_idle_rank(rank: int, rule: schema.RouterRule) -> tuple[list[float], float]:
    groups, router = start_two(rank), make_router(Router(rule=rule))
    g = torch.Generator().manual_seed(1)
    tokens = torch.randn(10, 4, 16, generator=g) if rank == 0 else torch.zeros(0, 4, 16)
    router(tokens)[0].sum().backward()
    numbers = update_biases([router], groups.tp_dp_cp)
    return router.bias.tolist(), numbers[1]["tokens"]


@pytest.mark.parametrize("rule", schema.RouterRule)
def test_ranks_without_tokens_get_the_biases_of_those_that_have_some(rule: schema.RouterRule) -> None:
    alone = make_router(Router(rule=rule))
    route(alone, 40)
    update_biases([alone])
    assert run_ranks(2, update_beside_an_idle_rank, rule) == [(alone.bias.tolist(), 40)] * 2


def test_a_model_may_come_without_a_list() -> None:
    router = make_router()
    route(router)
    assert update_biases(router)[1]["tokens"] == 40


@pytest.mark.parametrize(
    ("biases", "told"),
    [
        (torch.zeros(8), r"biases have shape \(8,\): .* \[routers, experts\] = \(1, 8\)"),
        (torch.zeros(1, 4), r"biases have shape \(1, 4\)"),
        (torch.tensor([[0.0] * 7 + [float("nan")]]), "biases hold numbers that are not finite"),
    ],
)
def test_biases_that_cannot_be_are_refused(biases: torch.Tensor, told: str) -> None:
    router = make_router()
    with pytest.raises(ValueError, match=told):
        set_biases([router], biases)
    assert not router.bias.any()


def test_a_wrong_setting_survives_megatron_core_s_spec():
    wrong = ModuleSpec(MegatronRouter, params={"settings": Router(quantile=Quantile(bins=0))})
    with pytest.raises(ValueError, match=r"quantile.bins = 0 must be at least 2. Use 2 or more. \[range\]"):
        build_module(wrong, config=make_config())


@pytest.mark.parametrize(
    "option",
    [
        {"moe_aux_loss_coeff": 0.01},
        {"moe_z_loss_coeff": 0.001},
        {"moe_input_jitter_eps": 0.1},
        {"moe_expert_capacity_factor": 1.0, "moe_token_dispatcher_type": "alltoall"},
        {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
        {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
        {"moe_router_force_load_balancing": True},
        {"moe_router_load_balancing_type": "sinkhorn"},
    ],
    ids=lambda option: next(iter(option)),
)
def test_options_that_would_have_no_effect_are_refused(option: dict[str, Any]) -> None:
    (name, value), *_ = option.items()
    with pytest.raises(ValueError, match=f"{name}={value} would have no effect.*take them out"):
        make_router(**option)


@pytest.mark.parametrize(("dtype", "wanted"), [(None, torch.bfloat16), ("fp32", torch.float32)])
def test_weights_have_the_dtype_that_the_config_asks_for(dtype: str | None, wanted: torch.dtype) -> None:
    weights, _ = make_router(moe_router_dtype=dtype)(torch.randn(5, 2, 16, dtype=torch.bfloat16))
    assert weights.dtype is wanted
    torch.testing.assert_close(
        weights.float().sum(-1), torch.ones(10), rtol=0, atol=1e-2 if dtype is None else 1e-6
    )


def test_a_forgotten_update_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron, "UNTOLD_PASSES", 3)
    router = make_router()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            route(router)
            route(router)
            update_biases([router])
        with torch.no_grad():
            for _ in range(5):
                route(router)
    expected = "layer 1 has counted 3 forward passes.*call .*update_biases"
    route(router)
    route(router)
    with pytest.warns(UserWarning, match=expected):
        route(router)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        route(router)


def test_layers_of_multi_token_prediction_are_reported_after_the_decoder_s():
    routers = torch.nn.ModuleList([make_router(), make_router(mtp=True)])
    route(routers[0], 40)
    route(routers[1], 20)
    numbers = update_biases([routers])
    assert {layer: row["tokens"] for layer, row in numbers.items()} == {1: 40, 4: 20}


def test_a_step_ends_once():
    router = make_router(Router(quantile=Quantile(window=4)))
    route(router)
    update = start_update([router])
    update.finish()
    bias = router.bias.clone()
    for again in (update.finish, update.discard):
        with pytest.raises(RuntimeError, match="finished or discarded before: call start_update again"):
            again()
    assert update_biases([router])[1]["tokens"] == 0
    assert torch.equal(router.bias, bias)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"settings": Router(rule=schema.RouterRule.sign)}, "settings"),
        ({"settings": Router(quantile=Quantile(window=8))}, "settings"),
        ({"num_moe_experts": 4}, "num_experts"),
        ({"moe_router_topk": 3}, "top_k"),
    ],
)
def test_routers_of_one_update_are_alike(other: dict[str, Any], what: str) -> None:
    routers = [make_router(Router(rule=schema.RouterRule.none)), make_router(**other)]
    routers = routers if "settings" in other else [make_router(), routers[1]]
    routers[1].set_layer_number(2)
    with pytest.raises(ValueError, match=f"layers 1 and 2 differ in {what}: give all routers"):
        update_biases(routers)


def start_two(rank: int) -> ProcessGroupCollection:
    layout = make_layout(schema.Model(), schema.Parallel(), 2)
    return start_groups(layout, seed=5).pg


def update_without_group(rank: int) -> str:
    start_two(rank)
    router = make_router()
    route(router, seed=rank)
    with pytest.raises(ValueError, match="group is missing and there are 2 ranks") as told:
        update_biases([router])
    assert not update_biases([router], discard=True)
    return str(told.value)


def test_a_missing_group_is_told_before_biases_drift_apart():
    for told in run_ranks(2, update_without_group):
        assert told.endswith("pass the ranks that saw different tokens, pg_collection.tp_dp_cp")


def update_router_of_another(rank: int) -> str:
    groups = start_two(rank)
    config = make_config(moe_ffn_hidden_size=8, add_bias_linear=False, gated_linear_unit=True)
    parts = MoESubmodules(experts=LocalSpecProvider().grouped_mlp_modules(False), router=MegatronRouter)
    layer = partial(MoELayer, submodules=parts)(config=config, layer_number=1, pg_collection=groups)
    chunk = DistributedDataParallel(config, DistributedDataParallelConfig(), layer, pg_collection=groups)
    update_biases([chunk], groups.tp_dp_cp)
    layer.router = MegatronRouter(config, groups)
    layer.router.set_layer_number(1)
    with pytest.raises(ValueError, match="layer 1 came into the model after DistributedDataParallel") as told:
        update_biases([chunk], groups.tp_dp_cp)
    return str(told.value)


def test_a_router_that_its_wrapper_does_not_train_is_told():
    for told in run_ranks(2, update_router_of_another):
        assert told.endswith("build routers with the model, before it and the optimizer")


def test_takes_over_the_weights_and_expert_biases_of_megatron_core_s_router():
    options = {"moe_router_load_balancing_type": "none", "moe_router_score_function": "sigmoid"}
    options["add_bias_linear"] = False
    router = make_router(**options)
    groups = SimpleNamespace(tp=None, cp=None, tp_cp=None, tp_dp_cp=None)
    old = TopKRouter(make_config(**options, moe_router_enable_expert_bias=True), groups).cpu()
    old.set_layer_number(1)
    with torch.no_grad():
        old.expert_bias.normal_(std=0.1)
    missing = router.load_state_dict(
        {name: tensor for name, tensor in old.state_dict().items() if name != "expert_bias"}, strict=False
    )
    set_biases([router], old.expert_bias[None])
    tokens = torch.randn(10, 4, 16)
    assert missing.missing_keys == ["bias", "bounds"]
    for mine, its in zip(router.eval()(tokens), old.eval()(tokens), strict=True):
        torch.testing.assert_close(mine, its)
