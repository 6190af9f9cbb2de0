"""The token embedding."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import (
    VocabParallelEmbedding,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from k3train.kernels.embedding import embed


class TokenEmbedding(VocabParallelEmbedding):
    """megatron-core's embedding, its rows sharded over tp; its gradient is not the size of the table."""

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        """int [b, s] -> [b, s, hidden], or [s / tp, b, hidden] under sequence parallelism.

        Every rank of tp must call this.
        """
        assert self.weight is not None
        group: Any = self.tp_group
        out = embed(tokens.long() - self.vocab_start_index, self.weight)
        if self.reduce_scatter_embeddings:
            # Data format change to avoid explicit transposes: [b s h] -> [s b h].
            out = out.transpose(0, 1).contiguous()
            return reduce_scatter_to_sequence_parallel_region(out, group=group)
        if group.size() > 1:
            return reduce_from_tensor_model_parallel_region(out, group=group)
        return out
