"""The learned part of attention residuals: one pseudo-query over depth before every sublayer."""

from __future__ import annotations

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from k3train.kernels.attn_res import mix
from k3train.model.parameters import fp32_vector


class DepthMix(nn.Module):
    """Input of a sublayer as a softmax-weighted average of earlier outputs (k3 report eq. 8-10).

    The query starts at zero, so that a new model takes the plain mean of what is there.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.query = fp32_vector(config, config.hidden_size, 0.0)
        self.norm_weight = fp32_vector(config, config.hidden_size, 1.0)
        self.eps = config.layernorm_epsilon

    def forward(self, sources: tuple[Tensor, ...]) -> Tensor:
        """Finished blocks, oldest first, then the running prefix: each [s, b, hidden], as is the result."""
        return mix(list(sources), self.query, self.norm_weight, self.eps)
