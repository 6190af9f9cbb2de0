"""Attention residuals over megatron-core's own attention and feed-forward: a mix over depth feeds each.

    python docs/examples/attn_res.py

Runs on one GPU, or on the CPU by k3train's bridge, without which megatron-core needs a GPU. megatron-core's
TransformerLayer adds to one residual stream by itself, so its parts are built from its spec one by one.
"""

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn

from k3train.backend.start import start_backend, start_processes
from k3train.model.attn_res import DepthMix
from k3train.model.layer import advance

BLOCK_LAYERS = 2


class Layer(nn.Module):
    """megatron-core's attention and MLP, each fed by a softmax over depth in place of the residual sum."""

    def __init__(self, config: TransformerConfig, index: int, groups: Any) -> None:
        super().__init__()
        parts = get_gpt_layer_local_submodules(normalization="RMSNorm")
        self.starts_block = index % BLOCK_LAYERS == 0
        self.attention = build_module(
            parts.self_attention, config=config, layer_number=index + 1, pg_collection=groups
        )
        self.mlp = parts.mlp(config=config, pg_collection=groups, is_mtp_layer=False, name=None)
        self.attention_mix, self.mlp_mix = DepthMix(config), DepthMix(config)
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(config.hidden_size) for _ in range(2))

    def forward(self, sources: tuple[Tensor, ...], mask: Tensor) -> tuple[Tensor, ...]:
        """Finished blocks and the running sum, [s, b, hidden] each, before the layer -> after it."""
        out, _ = self.attention(self.attention_norm(self.attention_mix(sources)), mask)
        prefix = out if self.starts_block else sources[-1] + out
        sources = advance(sources, prefix, self.starts_block)
        out, _ = self.mlp(self.mlp_norm(self.mlp_mix(sources)))
        return advance(sources, sources[-1] + out, starts_block=False)


def example() -> list[float]:
    """Train four layers to count; returns the loss of each step."""
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    config = TransformerConfig(
        num_layers=4, hidden_size=64, num_attention_heads=4, gated_linear_unit=True, add_bias_linear=False,
        normalization="RMSNorm", hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    device = torch.cuda.current_device()
    layers = nn.ModuleList(Layer(config, index, groups) for index in range(4)).to(device)
    embedding, mix, head = nn.Embedding(64, 64), DepthMix(config), nn.Linear(64, 64)
    modules = nn.ModuleList([layers, embedding, mix, head]).to(device)
    optimizer = torch.optim.AdamW(modules.parameters(), lr=3e-3)
    mask = torch.ones(1, 1, 32, 32, dtype=torch.bool, device=device).triu(1)
    losses = []
    for _ in range(20):
        tokens = (torch.randint(64, (4, 1), device=device) + torch.arange(33, device=device)).T % 64
        sources: tuple[Tensor, ...] = (embedding(tokens[:-1]),)
        for layer in layers:
            sources = layer(sources, mask)
        logits = head(mix(sources))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[1:].flatten())
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
