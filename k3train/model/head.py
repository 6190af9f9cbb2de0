"""The output head: logits, or losses without ever holding all logits."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from torch import Tensor

from k3train.kernels.cross_entropy import cross_entropy
from k3train.model.config import K3Config


class OutputHead(ColumnParallelLinear):
    """Untied projection to the vocabulary, whose rows are sharded over tp."""

    config: K3Config

    def __init__(self, config: K3Config, pg_collection: Any) -> None:
        assert config.init_method is not None
        super().__init__(
            config.k3.hidden_size,
            config.k3.vocab_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            tp_group=pg_collection.tp,
        )

    def forward(self, hidden: Tensor, labels: Tensor | None) -> Tensor:  # type: ignore[override]
        """Losses fp32 [1, n/cp], 0 where the label is ignored; without labels, logits [1, n/cp, vocabulary].

        ``hidden`` [n/(tp*cp), 1, hidden] after the final norm, labels [1, n/cp]. Every rank of tp must call
        this.
        """
        assert self.weight is not None
        if self.config.sequence_parallel:
            # Each rank's gradient covers its own vocabulary rows: the backward pass sums them over tp.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True, group=self.tp_group
            )
        hidden = hidden.flatten(0, 1)
        if labels is not None:
            keep = self.training and not self.config.recompute.saves_memory
            return cross_entropy(hidden, self.weight, labels[0], self.tp_group, keep=keep)[None]
        return gather_from_tensor_model_parallel_region(hidden @ self.weight.T, group=self.tp_group)[None]
