"""Multi-token prediction: one more layer that predicts the token after the next."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from k3train.config.schema import Recompute
from k3train.kernels.packing import Packing
from k3train.kernels.recompute import again, make_again
from k3train.model.config import K3Config
from k3train.model.layer import in_pieces, own_valid, works_in_pieces
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
        mla, moe = config.recompute.mla, config.recompute.moe
        self.recompute_attention, self.recompute_ffn = mla, moe
        self.recompute_all = mla is moe is Recompute.full
        self.on_host = config.recompute.on_host
        selective = mla is Recompute.selective
        full = mla is Recompute.full
        self.attention = GatedMla(config, number, pg_collection, selective=selective, again=full)
        self.ffn_norm = RmsNorm(config, hidden)
        self.ffn = LatentMoe(config, number, pg_collection, selective=moe is Recompute.selective)
        self.final_norm = RmsNorm(config, hidden)

    def forward(self, hidden: Tensor, next_embedding: Tensor, *, packing: Packing) -> Tensor:
        """Input of the output head that predicts token t + 2 at position t.

        ``hidden`` is the trunk's output before its final norm, ``next_embedding`` the embedding of token
        t + 1; both, and the result, [s, b, hidden] as between sublayers.
        """
        whole = partial(self._forward, packing=packing)
        return again(whole, hidden, next_embedding, on=self.recompute_all, on_host=self.on_host)

    def _forward(self, hidden: Tensor, next_embedding: Tensor, *, packing: Packing) -> Tensor:
        x = make_again(
            lambda *both: torch.cat([self.hidden_norm(both[0]), self.embedding_norm(both[1])], dim=-1),
            self.projection,
            hidden,
            next_embedding,
            on=self.recompute_attention is Recompute.selective,
        )
        x = x + self._sublayer(self.attention_norm, self.attention, x, packing, self.recompute_attention)
        if works_in_pieces(self.recompute_ffn, x):
            x = x + in_pieces(self._fed, x, own_valid(packing, self.tp_group))
        else:
            x = x + self._sublayer(self.ffn_norm, self.ffn, x, packing, self.recompute_ffn)
        return self.final_norm(x)

    def _fed(self, x: Tensor, valid: Tensor) -> Tensor:
        """What the feed-forward adds to ``x``; bool [s], False on padding."""
        return self.ffn(self.ffn_norm(x), padding_mask=valid.logical_not()[None])[0]

    def _sublayer(
        self, norm: Any, sublayer: Any, x: Tensor, packing: Packing, recompute: Recompute
    ) -> Tensor:
        def run(x: Tensor) -> Tensor:
            return make_again(
                norm,
                lambda h: sublayer(h, packed_seq_params=packing)[0],
                x,
                on=recompute is Recompute.selective,
            )

        full = recompute is Recompute.full and not self.recompute_all
        return again(run, x, on=full, on_host=self.on_host)
