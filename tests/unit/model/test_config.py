from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from k3train.config import schema
from k3train.model.config import make_config


def layout(**degrees):
    return SimpleNamespace(**{"tp": 1, "pp": 1, "vp": 1, "cp": 1, "ep": 1, "etp": 1, **degrees})


def test_numbers_and_degrees_reach_megatron_core():
    model = schema.Model(precision=schema.Precision.bf16)
    config = make_config(model, schema.Parallel(), layout(tp=2, pp=2, vp=2, cp=2, ep=2))
    assert config.k3 is model
    assert config.params_dtype is config.pipeline_dtype is torch.bfloat16
    assert config.sequence_parallel
    assert config.calculate_per_token_loss
    assert (config.virtual_pipeline_model_parallel_size, config.pipeline_model_parallel_size) == (2, 2)
    assert (config.overlap_p2p_comm, config.batch_p2p_comm) == (True, False)
    assert config.expert_tensor_parallel_size == 1


def test_initial_matrices_have_the_configured_standard_deviation():
    config = make_config(schema.Model(init_std=0.5), schema.Parallel(), layout())
    for init in (config.init_method, config.output_layer_init_method, config.embedding_init_method):
        torch.manual_seed(0)
        drawn = torch.empty(200, 200)
        init(drawn)
        assert abs(drawn.std().item() - 0.5) < 0.01


def test_uneven_pipelines_are_accepted():
    config = make_config(schema.Model(num_layers=5), schema.Parallel(), layout(pp=2, vp=2))
    assert config.num_layers == 5


@pytest.mark.parametrize(
    ("degrees", "changes", "words"),
    [
        ({"pp": 2, "vp": 2}, {"batch_p2p_comm": True, "overlap_p2p_comm": False}, "mixes up messages"),
        ({"cp": 2}, {"calculate_per_token_loss": False}, "however few loss tokens"),
    ],
)
def test_what_megatron_core_gets_wrong_silently_is_refused(degrees, changes, words):
    config = make_config(schema.Model(), schema.Parallel(), layout(**degrees))
    with pytest.raises(ValueError, match=words):
        replace(config, **changes)
