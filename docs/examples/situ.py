"""SiTU-GLU as the feed-forward of megatron-core's own GPT model.

    python docs/examples/situ.py

Runs on one GPU, or on the CPU by k3train's bridge, without which megatron-core needs a GPU. The activation
alone, for a feed-forward of your own, is ``k3train.kernels.situ.situ_glu(gate, up, 4.0, 25.0)``.
"""

from functools import partial

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

from k3train.backend.start import start_backend, start_processes
from k3train.config.schema import Situ
from k3train.model.mlp import SituMlp


def example() -> list[float]:
    """Train a model of two such layers to count; returns the loss of each step."""
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, add_bias_linear=False, normalization="RMSNorm",
        hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.mlp = partial(SituMlp, ffn_size=128, settings=Situ(gate_cap=4.0, up_cap=25.0))
    model = GPTModel(config, spec, vocab_size=64, max_sequence_length=64, position_embedding_type="none")
    device = torch.cuda.current_device()
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    places = torch.arange(64, device=device).expand(4, -1)
    mask = torch.ones(1, 1, 64, 64, dtype=torch.bool, device=device).triu(1)
    losses = []
    for _ in range(20):
        tokens = (torch.randint(64, (4, 1), device=device) + torch.arange(65, device=device)) % 64
        loss = model(tokens[:, :-1], places, mask, labels=tokens[:, 1:]).mean()
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
