"""The RMSNorm module of every pre-norm, latent norm and final norm."""

from __future__ import annotations

from torch import Tensor, nn

from k3train.kernels.rms_norm import rms_norm
from k3train.model.config import K3Config
from k3train.model.parameters import fp32_vector


class RmsNorm(nn.Module):
    """RMSNorm with an fp32 weight; unlike megatron-core's torch norm it allows sequence parallelism."""

    def __init__(self, config: K3Config, size: int, eps: float | None = None) -> None:
        super().__init__()
        self.weight = fp32_vector(config, size, 1.0)
        self.eps = config.k3.norm_eps if eps is None else eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size], sharded over sequence or not; the result has x's shape and dtype."""
        return rms_norm(x, self.weight, self.eps)
