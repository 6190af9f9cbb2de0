"""config.json against a model group, both ways."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from k3train.checkpoint.hf.config import from_config, own_settings, to_config
from k3train.checkpoint.hf.names import Layout
from k3train.checkpoint.manifest import CheckpointError
from k3train.config.compose import compose
from k3train.config.schema import (
    AttnRes,
    Kda,
    Mla,
    Model,
    Moe,
    Mtp,
    Precision,
    Quantile,
    Router,
    RouterRule,
    Situ,
)

PUBLISHED: dict[str, Any] = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "media_placeholder_token_id": 163605,
    "model_type": "kimi_k3",
    "text_config": {
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 12,
        "dtype": "bfloat16",
        "first_k_dense_replace": 1,
        "hidden_act": "situ",
        "hidden_size": 7168,
        "intermediate_size": 33792,
        "kv_lora_rank": 512,
        "latent_moe_use_norm": True,
        "linear_attn_config": {
            "full_attn_layers": [*range(4, 93, 4), 93],
            "gate_lower_bound": -5.0,
            "head_dim": 128,
            "kda_layers": [layer for layer in range(1, 93) if layer % 4],
            "num_heads": 96,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
        },
        "max_position_embeddings": 1048576,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "model_type": "kimi_linear",
        "moe_intermediate_size": 3072,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": 96,
        "num_expert_group": 1,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_hidden_layers": 93,
        "num_key_value_heads": 96,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 2,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {
            "config_groups": {"group_0": {"weights": {"group_size": 32, "num_bits": 4, "type": "float"}}},
            "format": "mxfp4-pack-quantized",
            "quant_method": "compressed-tensors",
        },
        "rms_norm_eps": 1e-05,
        "routed_expert_hidden_size": 3584,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_grouped_topk": True,
        "v_head_dim": 128,
        "vocab_size": 163840,
    },
    "vision_config": {"vt_hidden_size": 1024},
}
"""What the released config.json says of the text model (k3 spec section 1.1)."""

KIMI_LINEAR = {
    "architectures": ["KimiLinearForCausalLM"],
    "dtype": "bfloat16",
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [layer for layer in range(1, 27) if layer % 4],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "num_attention_heads": 32,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "routed_scaling_factor": 2.446,
    "v_head_dim": 128,
    "vocab_size": 163840,
}

STRANGE = Model(
    num_layers=7,
    mla_layers=[0, 5],
    mla_every=9,
    norm_eps=3e-5,
    init_std=0.013,
    kda=Kda(decay_rank=7, dt_min=0.002, dt_max=0.3, norm_eps=2e-5, gate_lower_bound=-3.25),
    mla=Mla(norm_eps=1e-5),
    attn_res=AttnRes(block_layers=3),
    moe=Moe(
        shared_ffn_size=48, latent_norm=False, router=Router(rule=RouterRule.none, quantile=Quantile(bins=77))
    ),
    situ=Situ(gate_cap=3.5, up_cap=20.0),
    mtp=Mtp(num_layers=1, loss_weight=0.25),
)


def changed(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A copy with other keys in its text_config; None takes one out."""
    copy = deepcopy(config)
    for key, value in changes.items():
        if value is None:
            del copy["text_config"][key]
        else:
            copy["text_config"][key] = value
    return copy


def test_the_published_config_is_the_k3_preset() -> None:
    config = from_config(PUBLISHED)
    assert config.model == compose(["model=k3"]).model
    assert (config.layout, config.packed, config.tied, config.unused) == (Layout.k3, True, False, [])
    assert config.vision == PUBLISHED["vision_config"]


def test_an_export_of_the_k3_preset_says_what_the_published_config_says() -> None:
    written = to_config(
        compose(["model=k3"]).model,
        Layout.k3,
        precision=Precision.bf16,
        vision=PUBLISHED["vision_config"],
        max_tokens=1048576,
    )
    published = deepcopy(PUBLISHED)
    del published["text_config"]["quantization_config"]  # an export is not packed
    assert published["text_config"].items() <= written["text_config"].items()
    assert "k3train" not in written
    assert written["vision_config"] == published["vision_config"]


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("preset", ["debug", "k3_3b", "k3_proxy", "k3_48b", "k3", None])
def test_a_model_comes_back_as_it_was(preset: str | None, layout: Layout) -> None:
    model = compose([f"model={preset}"]).model if preset else STRANGE
    written = json.loads(json.dumps(to_config(model, layout, precision=model.precision)))
    config = from_config(written)
    assert config.model == model
    assert (config.layout, config.packed, config.unused) == (layout, False, [])


def test_settings_without_a_key_in_the_release_are_named() -> None:
    assert own_settings(compose(["model=k3"]).model, Precision.bf16) == {}
    assert own_settings(compose(["model=debug"]).model, Precision.bf16) == {"kda.decay_rank": 16}
    assert {"mla.norm_eps", "mla_every", "moe.router.rule", "mtp.loss_weight"} < own_settings(
        STRANGE, Precision.fp32
    ).keys()


def test_another_precision_is_the_only_thing_an_export_may_change() -> None:
    model = replace(STRANGE, precision=Precision.fp32)
    config = from_config(to_config(model, Layout.k3, precision=Precision.bf16))
    assert config.model == replace(model, precision=Precision.bf16)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (changed(PUBLISHED, hidden_act="silu"), "hidden_act = 'silu'; k3train computes 'situ' only"),
        (changed(PUBLISHED, model_type="x"), "model_type = 'x'; k3train computes 'kimi_linear' only"),
        (changed(PUBLISHED, model_type=-1), "model_type = -1; k3train"),
        (changed(PUBLISHED, model_type=[]), "model_type = []; k3train"),
        (changed(PUBLISHED, routed_scaling_factor=2.5), "routed_scaling_factor = 2.5"),
        (changed(PUBLISHED, mla_use_output_gate=None), "mla_use_output_gate is missing"),
        (changed(PUBLISHED, num_experts=None), "num_experts is missing"),
        (changed(PUBLISHED, dtype="float16"), "dtype = 'float16'"),
        (changed(PUBLISHED, num_key_value_heads=8), "num_key_value_heads = 8; k3train computes 96 only"),
        (changed(PUBLISHED, num_hidden_layers=92), "do not share layers 1 to 92"),
        (
            changed(PUBLISHED, quantization_config={"format": "nvfp4-pack-quantized"}),
            "'nvfp4-pack-quantized'",
        ),
        (changed(PUBLISHED, vocab_size="many"), "model.vocab_size = many must be a whole number"),
        (changed(PUBLISHED, hidden_size=-4), "hidden_size = -4 must be at least 1. Use 1 or more"),
        (changed(PUBLISHED, num_hidden_layers=10**12), "do not share layers 1 to 1000000000000"),
        (
            {**PUBLISHED, "k3train": {"kda.decay_rank": 0}},
            "k3train.kda.decay_rank = 0 must be at least 1. Use 1 or more",
        ),
        ({**PUBLISHED, "k3train": {"kda.decay_rnk": 4}}, "Did you mean model.kda.decay_rank?"),
        ({**PUBLISHED, "k3train": {"num_layers": 4}}, "k3train.num_layers: the release has a key for that"),
        ({**PUBLISHED, "k3train": {"mla_every": 3}}, "mla_every and mla_layers are not those of"),
        (changed(PUBLISHED, num_hidden_layers="93"), "num_hidden_layers = '93' is no whole number"),
        ({**PUBLISHED, "k3train": [4]}, "k3train is no mapping of keys"),
        ({**PUBLISHED, "text_config": None}, "text_config is no mapping of keys"),
        (changed(PUBLISHED, linear_attn_config=[1]), "linear_attn_config is no mapping of keys"),
        (
            changed(PUBLISHED, linear_attn_config={"full_attn_layers": ["x"], "kda_layers": []}),
            "layers 1 to 93",
        ),
    ],
)
def test_what_k3train_does_not_compute_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        from_config(config)
    assert words in str(error.value)


def test_kimi_linear_itself_is_refused_with_all_that_differs() -> None:
    with pytest.raises(CheckpointError) as error:
        from_config(KIMI_LINEAR)
    lines = str(error.value).splitlines()[1:]
    for key in (
        "hidden_act",
        "q_lora_rank",
        "attn_res_block_size",
        "routed_expert_hidden_size",
        "mla_use_output",
    ):
        assert any(line.strip().startswith(key) for line in lines), key


def test_keys_that_nothing_reads_are_reported() -> None:
    assert from_config(changed(PUBLISHED, rope_theta=1e4, torchscript=False)).unused == ["rope_theta"]
