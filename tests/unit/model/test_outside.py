"""KDA, SiTU-GLU and attention residuals in other models than k3train's: settings, dtypes, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from k3train.config import schema
from k3train.config.schema import Kda, Situ
from k3train.model.attn_res import DepthMix
from k3train.model.kda import KdaAttention
from k3train.model.mlp import SituMlp
from k3train.parallel.groups import start_groups
from k3train.parallel.layout import make_layout
from tests.ranks import run_ranks

KDA = Kda(head_dim=8, decay_rank=4)
FP32 = {"A_log", "dt_bias", "q_conv", "k_conv", "v_conv", "o_norm", "query", "norm_weight"}


def make_config(**options: Any) -> TransformerConfig:
    return TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, **options)


def start_one() -> ProcessGroupCollection:
    return start_groups(make_layout(schema.Model(), schema.Parallel(), 1), seed=5).pg


def cast_by_the_wrapper(rank: int) -> dict[str, torch.dtype]:
    config, groups = make_config(bf16=True, params_dtype=torch.bfloat16), start_one()
    parts = torch.nn.ModuleList([KdaAttention(config, 1, groups, settings=KDA), DepthMix(config)])
    wrapped = Float16Module(config, parts)
    return {name.rpartition(".")[2]: tensor.dtype for name, tensor in wrapped.named_parameters()}


def test_small_parameters_stay_fp32_under_megatron_core_s_bf16_wrapper():
    (found,) = run_ranks(1, cast_by_the_wrapper)
    assert {name for name, dtype in found.items() if dtype is torch.float32} == FP32
    assert found["weight"] is torch.bfloat16


def told(rank: int) -> dict[str, str]:
    config, groups = make_config(), start_one()
    mix, tokens = DepthMix(config), torch.randn(4, 2, 16)
    tries = {
        "no kda settings": lambda: KdaAttention(config, 1, groups),
        "no situ settings": lambda: SituMlp(config, 32, groups),
        "bound": lambda: KdaAttention(config, 1, groups, settings=Kda(gate_lower_bound=-8.0)),
        "steps": lambda: KdaAttention(config, 1, groups, settings=Kda(dt_min=1.0, dt_max=0.1)),
        "cap": lambda: SituMlp(config, 32, groups, settings=Situ(gate_cap=0.0)),
        "one tensor": lambda: mix(tokens),
        "none": lambda: mix(()),
        "unequal": lambda: mix((tokens, tokens[:2])),
        "narrow": lambda: mix((tokens[..., :8], tokens[..., :8])),
    }
    found = {}
    for name, attempt in tries.items():
        with pytest.raises(ValueError) as error:  # noqa: PT011 - the test compares the sentence
            attempt()
        found[name] = str(error.value)
    return found


def test_wrong_use_is_told_in_a_sentence():
    (found,) = run_ranks(1, told)
    missing = "settings is missing, and a plain TransformerConfig has none of K3's: pass settings="
    shape = "pass one or more of one shape, [..., 16]"
    assert found == {
        "no kda settings": f"{missing}k3train.config.schema.Kda(...)",
        "no situ settings": f"{missing}k3train.config.schema.Situ(...)",
        "bound": "model.kda.gate_lower_bound = -8.0 must be at least -5. Use -5 or more. [range]",
        "steps": "model.kda.dt_min = 1.0 must not be more than model.kda.dt_max = 0.1. "
        "Use at most 0.1. [model.dt]",
        "cap": "model.situ.gate_cap = 0.0 must be more than 0. Use a number more than 0. [range]",
        "one tensor": "sources is one tensor of shape (4, 2, 16) and would be mixed along its first axis: "
        "pass a tuple of tensors, one per source",
        "none": f"sources are none: {shape}",
        "unequal": f"sources are (4, 2, 16), (2, 2, 16): {shape}",
        "narrow": f"sources are (4, 2, 8), (4, 2, 8): {shape}",
    }
