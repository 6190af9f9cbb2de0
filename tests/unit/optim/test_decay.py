"""Weight decay reaches matrices and nothing else."""

from __future__ import annotations

import pytest
import torch

from k3train.optim.decay import is_decayed

MATRIX = torch.zeros(4, 3)
VECTOR = torch.zeros(4)


@pytest.mark.parametrize(
    "name",
    [
        "module.embedding.word_embeddings.weight",
        "module.decoder.layers.3.self_attention.q_proj.weight",
        "module.decoder.layers.3.mlp.router.weight",
        "module.decoder.layers.3.mlp.experts.weight1",
        "output_layer.weight",
    ],
)
def test_matrices_decay(name: str) -> None:
    assert is_decayed(name, MATRIX)


@pytest.mark.parametrize(
    ("name", "param"),
    [
        ("decoder.layers.0.input_layernorm.weight", VECTOR),
        ("decoder.layers.0.latent_norm.weight", MATRIX),
        ("decoder.layers.0.self_attention.A_log", VECTOR),
        ("decoder.layers.0.self_attention.dt_bias", MATRIX),
        ("decoder.layers.0.self_attention.q_conv.weight", MATRIX),
        ("decoder.layers.0.attn_res.query", MATRIX),
        ("decoder.layers.0.mlp.router.expert_bias", VECTOR),
        ("anything.bias", VECTOR),
    ],
)
def test_the_rest_does_not(name: str, param: torch.Tensor) -> None:
    assert not is_decayed(name, param)


def test_a_module_may_exempt_its_own() -> None:
    param = torch.nn.Parameter(torch.zeros(4, 3))
    param.no_weight_decay = True  # type: ignore[attr-defined]
    assert not is_decayed("weight", param)
