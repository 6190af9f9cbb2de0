"""Quantile balancing in megatron-core's own mixture of experts: another router in its MoESubmodules.

    python docs/examples/router.py

Runs on one GPU, or on the CPU by k3train's bridge, without which megatron-core needs a GPU.
"""

from functools import partial

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import build_module

from k3train.backend.start import start_backend, start_processes
from k3train.config.schema import Quantile, Router
from k3train.router.megatron import MegatronRouter
from k3train.router.update import update_biases


def example() -> list[float]:
    """Train one layer for a few steps; returns the max violation of each."""
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, num_moe_experts=32, moe_router_topk=4,
        moe_ffn_hidden_size=32, gated_linear_unit=True, add_bias_linear=False, normalization="RMSNorm",
        moe_router_load_balancing_type="none", moe_aux_loss_coeff=0.0, init_method_std=0.3,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(num_experts=32, normalization="RMSNorm")
    linear = LocalSpecProvider()
    router = partial(MegatronRouter, settings=Router(quantile=Quantile(bins=1000)))
    spec.submodules.mlp = partial(
        MoELayer, submodules=MoESubmodules(experts=linear.grouped_mlp_modules(False), router=router)
    )
    layer = build_module(spec, config=config, layer_number=1, pg_collection=groups)
    layer.to(torch.cuda.current_device())
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-4)
    violations = []
    for _ in range(5):
        # All tokens point to one side, which favours some experts.
        hidden = torch.randn(512, 2, 64, device=torch.cuda.current_device()) + 0.5
        out, _ = layer(hidden, attention_mask=None)
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        violations.append(update_biases([layer], groups.tp_dp_cp)[1]["max_violation"])
    parallel_state.destroy_model_parallel()
    return violations


if __name__ == "__main__":
    start_processes(start_backend(), timeout_seconds=60)
    print("max violation:", *(f"{value:.2f}" for value in example()))
