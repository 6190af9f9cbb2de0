"""megatron-core's tensor-parallel linears, whose products may be in FP8."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from k3train.config.schema import Fp8
from k3train.kernels.linear import linear
from k3train.model.config import fp8_recipe


def weight_for(x: Tensor, module: Any) -> Tensor:
    """The weight of a linear whose product with ``x`` is not taken by its own ``forward``.

    What is hooked before that runs here: megatron-core's DistributedDataParallel waits there for parameters
    that are on their way from other ranks (``overlap_param_gather``).
    """
    for key, hook in module._forward_pre_hooks.items():
        hook(module, (x,), *([{}] if key in module._forward_pre_hooks_with_kwargs else []))
    return module.weight


class ColumnLinear(ColumnParallelLinear):
    """Rows of the weight sharded over tp; the input whole, or sharded over sequence."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:
        recipe = fp8_recipe(self.config)
        if recipe is Fp8.none:
            return super()._forward_impl(input, weight, *args, **options)
        if options["sequence_parallel"]:
            # megatron-core gathers a second time in the backward pass; this keeps what it gathered.
            input = gather_from_sequence_parallel_region(
                input, tensor_parallel_output_grad=True, group=self.tp_group
            )
        else:
            assert not options["allreduce_dgrad"], "tp without sequence parallelism"
        return linear(input, weight, recipe)


class RowLinear(RowParallelLinear):
    """Columns of the weight sharded over tp, as is the input; outputs are summed over tp."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:
        recipe = fp8_recipe(self.config)
        if recipe is Fp8.none:
            return super()._forward_impl(input, weight, *args, **options)
        return linear(input, weight, recipe)
