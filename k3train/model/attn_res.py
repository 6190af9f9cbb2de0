"""The learned part of attention residuals: one pseudo-query over depth before every sublayer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from k3train.backend.wide import never_narrower
from k3train.kernels.attn_res import mix
from k3train.model.parameters import fp32_vector


class DepthMix(nn.Module):
    """Input of a sublayer as a softmax-weighted average of earlier outputs (k3 report eq. 8-10).

    The query starts at zero, so that a new model takes the plain mean of what is there. Query and norm weight
    stay fp32 when a wrapper casts the model.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.query = fp32_vector(config, config.hidden_size, 0.0)
        self.norm_weight = fp32_vector(config, config.hidden_size, 1.0)
        self.eps = config.layernorm_epsilon

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DepthMix:
        return super()._apply(never_narrower(fn), recurse)

    def forward(self, sources: Sequence[Tensor]) -> Tensor:
        """Finished blocks, oldest first, then the running prefix: each [s, b, hidden], as is the result."""
        return mix(sources, self.query, self.norm_weight, self.eps)
