"""How parameters outside megatron-core's parallel linears are made."""

from __future__ import annotations

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from k3train.config.schema import Fp8
from k3train.kernels.linear import linear
from k3train.model.config import fp8_recipe


def fp32_vector(config: TransformerConfig, size: int, value: float) -> nn.Parameter:
    """A parameter [size] that is fp32 in every model, filled with ``value`` and equal on all tensor ranks.

    Under sequence parallelism each rank sees its own tokens, so megatron-core must sum its gradient over tp.
    """
    data = torch.full((size,), value, dtype=torch.float32, device=torch.cuda.current_device())
    return _replicated(nn.Parameter(data), config)


class Linear(nn.Linear):
    """A bias-free linear whose weight's gradient goes where ``main_grad`` says."""

    recipe = Fp8.none

    def reset_parameters(self) -> None:
        """Draws nothing: whoever makes it does, from a stream of megatron-core's tracker."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        return linear(input, self.weight, self.recipe)


def replicated_linear(config: TransformerConfig, inputs: int, outputs: int) -> Linear:
    """A bias-free linear [outputs, inputs] in the model's dtype for local tokens, equal on all tp ranks."""
    device = torch.cuda.current_device()
    made = Linear(inputs, outputs, bias=False, dtype=config.params_dtype, device=device)
    made.recipe = fp8_recipe(config)
    if config.perform_initialization:
        assert config.init_method is not None
        tracker = tensor_parallel.get_cuda_rng_tracker()
        assert tracker is not None
        with tracker.fork("data-parallel-rng"):
            config.init_method(made.weight)
    _replicated(made.weight, config)
    return made


def _replicated[T: Tensor](parameter: T, config: TransformerConfig) -> T:
    parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return parameter
