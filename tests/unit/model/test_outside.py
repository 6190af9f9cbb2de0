"""KDA, SiTU-GLU and attention residuals in other models than k3train's: settings, dtypes, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
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
        "no token axis": lambda: mix((tokens[0, 0], tokens[0, 0])),
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
    shape = "pass one or more of one shape, [tokens ..., 16]"
    assert found == {
        "no kda settings": f"{missing}k3train.config.schema.Kda(...)",
        "no situ settings": f"{missing}k3train.config.schema.Situ(...)",
        "bound": "model.kda.gate_lower_bound = -8.0 must be at least -5. Use -5 or more. [range]",
        "steps": "model.kda.dt_min = 1.0 must not be more than model.kda.dt_max = 0.1. "
        "Use at most 0.1. [model.dt]",
        "cap": "model.situ.gate_cap = 0.0 must be at least 0.001. Use 0.001 or more. [range]",
        "one tensor": "sources is one tensor of shape (4, 2, 16) and would be mixed along its first axis: "
        "pass a tuple of tensors, one per source",
        "none": f"sources are none: {shape}",
        "unequal": f"sources are (4, 2, 16), (2, 2, 16): {shape}",
        "narrow": f"sources are (4, 2, 8), (4, 2, 8): {shape}",
        "no token axis": f"sources are (16,), (16,): {shape}",
    }


def fed_wrongly(rank: int) -> dict[str, str]:
    config, groups = make_config(), start_one()
    layers = {
        "kda": KdaAttention(config, 1, groups, settings=KDA),
        "mlp": SituMlp(config, 32, groups, settings=Situ()),
    }
    inputs = {
        "flat": torch.randn(4, 16),
        "narrow": torch.randn(4, 2, 8),
        "bf16": torch.randn(4, 2, 16).bfloat16(),
    }
    found = {}
    for layer, module in layers.items():
        for name, x in inputs.items():
            with pytest.raises(ValueError) as error:  # noqa: PT011 - the test compares the sentence
                module(x)
            found[f"{layer} {name}"] = str(error.value)
    return found


def test_hidden_states_that_do_not_fit_are_told_in_a_sentence():
    (found,) = run_ranks(1, fed_wrongly)
    sentences = {
        "flat": "hidden states have shape (4, 16): the layer needs [s, b, 16]",
        "narrow": "hidden states have shape (4, 2, 8): the layer needs [s, b, 16]",
        "bf16": "hidden states are torch.bfloat16 and the layer's weights torch.float32: cast one of "
        "them, as megatron-core's Float16Module does for a whole model",
    }
    assert found == {f"{layer} {name}": told for layer in ("kda", "mlp") for name, told in sentences.items()}


def documents_of(layer: KdaAttention, borders: list[int] | None) -> torch.Tensor:
    packed = PackedSeqParams(cu_seqlens_q=None if borders is None else torch.tensor(borders))
    x = torch.randn(16, 1, 16, generator=torch.Generator().manual_seed(3))
    return layer(x, None, packed)[0]


def packed_wrongly(rank: int) -> list[str]:
    layer, found = KdaAttention(make_config(), 1, start_one(), settings=KDA), []
    for borders in (None, [], [0], [8, 16], [0, 10, 5, 16], [0, 20]):
        with pytest.raises(ValueError) as error:  # noqa: PT011 - the test compares the sentence
            documents_of(layer, borders)
        found.append(str(error.value))
    whole = documents_of(layer, [0, 5, 16])
    assert torch.equal(documents_of(layer, [0, 5, 5, 16]), whole)  # an empty document is one
    assert torch.equal(documents_of(layer, [0, 5]), whole)  # what follows the last is padding
    return found


def test_documents_that_cannot_lie_so_are_told_in_a_sentence():
    (found,) = run_ranks(1, packed_wrongly)
    none, order = "names no document: give 0 and the end of each", "must begin with 0 and not go back"
    assert [told.partition(": it holds")[0] for told in found] == [
        f"cu_seqlens_q = None {none}",
        f"cu_seqlens_q = [] {none}",
        f"cu_seqlens_q = [0] {none}",
        f"cu_seqlens = [8, 16] {order}",
        f"cu_seqlens = [0, 10, 5, 16] {order}",
        "packed documents need (1, 20) rows and tokens on this rank, got (1, 16)",
    ]


def passed_nothing(rank: int) -> None:
    config, groups = make_config(), start_one()
    layers = [KdaAttention(config, 1, groups, settings=KDA, **how) for how in ({}, {"again": True})]
    for layer in [*layers, SituMlp(config, 32, groups, settings=Situ())]:
        for shape in ((0, 2, 16), (4, 0, 16)):
            x = torch.zeros(shape, requires_grad=True)
            out, _ = layer(x)
            assert out.shape == x.shape
            out.sum().backward()
            # a gradient for every parameter: megatron-core's DistributedDataParallel waits for each
            assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())


def test_layers_take_no_tokens_and_no_rows():
    run_ranks(1, passed_nothing)
