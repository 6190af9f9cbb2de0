"""Kimi Delta Attention as the self-attention of megatron-core's own GPT model.

    python docs/examples/kda.py

Runs on one GPU, or on the CPU by k3train's bridge, without which megatron-core needs a GPU.
"""

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec

from k3train.backend.start import start_backend, start_processes
from k3train.config.schema import Kda
from k3train.model.kda import KdaAttention


def example() -> list[float]:
    """Train a model of two such layers to count; returns the loss of each step."""
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, gated_linear_unit=True, add_bias_linear=False,
        normalization="RMSNorm", hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    kda = Kda(head_dim=16, decay_rank=16, gate_lower_bound=-5.0)
    spec.submodules.self_attention = ModuleSpec(module=KdaAttention, params={"settings": kda})
    model = GPTModel(config, spec, vocab_size=64, max_sequence_length=64, position_embedding_type="none")
    device = torch.cuda.current_device()
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    places = torch.arange(64, device=device).expand(4, -1)
    losses = []
    for _ in range(20):
        tokens = (torch.randint(64, (4, 1), device=device) + torch.arange(65, device=device)) % 64
        # KDA is causal by itself: no attention mask.
        loss = model(tokens[:, :-1], places, attention_mask=None, labels=tokens[:, 1:]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    parallel_state.destroy_model_parallel()
    return losses


if __name__ == "__main__":
    start_processes(start_backend(), timeout_seconds=60)
    losses = example()
    print(f"loss: {losses[0]:.2f} at first, {losses[-1]:.2f} at last")
