"""Full recomputation of a layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from k3train.config.schema import Recompute
from k3train.model.config import K3Config


def run_layer(config: K3Config, layer: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """``layer(*inputs)``; with full recomputation only ``inputs`` are kept for its backward pass.

    Re-entrant, so that the first pass runs without gradients: routers count tokens only when gradients are
    on, that is once. Nothing in a layer draws random numbers.
    """
    if config.recompute is Recompute.full and torch.is_grad_enabled():
        return checkpoint(layer, *inputs, use_reentrant=True, preserve_rng_state=False)  # type: ignore[return-value]
    return layer(*inputs)
