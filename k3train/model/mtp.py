"""Multi-token prediction: one more layer that predicts the token after the next."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from k3train.kernels.packing import Packing
from k3train.model.config import K3Config
from k3train.model.mla import GatedMla
from k3train.model.moe import LatentMoe
from k3train.model.norm import RmsNorm
from k3train.model.parameters import replicated_linear


class MtpLayer(MegatronModule):
    """A backbone layer (gated MLA, mixture of experts) on the trunk's output and the next token's embedding.

    Embedding and output head are the model's own. With one layer there is no depth to mix, so its residual
    is a plain sum.
    """

    def __init__(self, config: K3Config, pg_collection: Any) -> None:
        super().__init__(config)
        self.tp_group = pg_collection.tp
        hidden, number = config.k3.hidden_size, config.k3.num_layers + 1
        self.hidden_norm = RmsNorm(config, hidden)
        self.embedding_norm = RmsNorm(config, hidden)
        self.projection = replicated_linear(config, 2 * hidden, hidden)
        self.attention_norm = RmsNorm(config, hidden)
        self.attention = GatedMla(config, layer_number=number, pg_collection=pg_collection)
        self.ffn_norm = RmsNorm(config, hidden)
        self.ffn = LatentMoe(config, layer_number=number, pg_collection=pg_collection)
        self.final_norm = RmsNorm(config, hidden)

    def forward(self, hidden: Tensor, next_embedding: Tensor, *, packing: Packing) -> Tensor:
        """Input of the output head that predicts token t + 2 at position t.

        ``hidden`` is the trunk's output before its final norm, ``next_embedding`` the embedding of token
        t + 1; both, and the result, [s, b, hidden] as between sublayers.
        """
        both = torch.cat([self.hidden_norm(hidden), self.embedding_norm(next_embedding)], dim=-1)
        x = self.projection(both)
        x = x + self.attention(self.attention_norm(x), packed_seq_params=packing)[0]
        x = x + self.ffn(self.ffn_norm(x), packed_seq_params=packing)[0]
        return self.final_norm(x)
