"""A whole step of megatron-core's GPT model with quantile-balanced experts: DDP, its optimizer, a checkpoint.

    python docs/examples/experts.py
    torchrun --standalone --nproc-per-node 2 docs/examples/experts.py  # the experts shared by two ranks

Runs on GPUs, or on the CPU by k3train's bridge, without which megatron-core needs a GPU.
"""

import tempfile
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules

from k3train.backend.start import start_backend, start_processes
from k3train.config.schema import Router
from k3train.router.megatron import MegatronRouter
from k3train.router.update import update_biases


def make_model() -> GPTModel:
    """Two layers of 8 experts, shared by all ranks."""
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, num_moe_experts=8, moe_router_topk=2,
        moe_ffn_hidden_size=32, gated_linear_unit=True, add_bias_linear=False, normalization="RMSNorm",
        moe_router_load_balancing_type="none", hidden_dropout=0.0, attention_dropout=0.0,
        expert_model_parallel_size=dist.get_world_size(), moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(num_experts=8, normalization="RMSNorm")
    submodules = MoESubmodules(
        experts=LocalSpecProvider().grouped_mlp_modules(False),
        router=partial(MegatronRouter, settings=Router()),
    )
    spec.submodules.mlp = partial(MoELayer, submodules=submodules)
    model = GPTModel(config, spec, vocab_size=64, max_sequence_length=64, position_embedding_type="none")
    return model.to(torch.cuda.current_device())


def example() -> list[float]:
    """Train to count on sequences whose last quarter is padding; returns the loss of each step."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    device = torch.cuda.current_device()
    model = make_model()
    chunk = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(use_distributed_optimizer=True), model
    )
    settings = OptimizerConfig(lr=3e-3, optimizer="adam", use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(settings, [chunk])
    mask = torch.ones(1, 1, 64, 64, dtype=torch.bool, device=device).triu(1)
    padding = torch.zeros(4, 64, dtype=torch.bool, device=device)
    padding[:, 48:] = True
    losses = []
    for step in range(20):
        torch.manual_seed(100 * step + dist.get_rank())  # this rank's tokens
        tokens = (torch.randint(64, (4, 1), device=device) + torch.arange(65, device=device)) % 64
        chunk.zero_grad_buffer()
        places = torch.arange(64, device=device).expand(4, -1)
        # padding is routed but not counted; the loss leaves it out on its own
        each = chunk(tokens[:, :-1], places, mask, labels=tokens[:, 1:], padding_mask=padding)
        kept = each.masked_fill(padding, 0)
        kept.sum().backward()
        finalize_model_grads([chunk], (~padding).sum())
        updated, _, _ = optimizer.step()
        # the end of a step, on every rank; a step that the optimizer left out is forgotten
        balance = update_biases([chunk], groups.tp_dp_cp, discard=not updated)
        assert not updated or balance[1]["tokens"] == 4 * 48 * dist.get_world_size()
        losses.append(float(kept.detach().sum() / (~padding).sum()))
    check_checkpoint(model)
    parallel_state.destroy_model_parallel()
    return losses


def check_checkpoint(model: GPTModel) -> None:
    """Biases are part of the model's checkpoint."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    dist_checkpointing.save(model.sharded_state_dict(), folder[0])
    other = make_model()
    other.load_state_dict(dist_checkpointing.load(other.sharded_state_dict(), folder[0]))
    for name, tensor in model.named_buffers():
        if name.endswith("router.bias"):
            assert tensor.any()
            assert torch.equal(tensor, other.get_buffer(name))


if __name__ == "__main__":
    start_processes(start_backend(), timeout_seconds=60)
    losses = example()
    print(f"loss: {losses[0]:.2f} at first, {losses[-1]:.2f} at last")
