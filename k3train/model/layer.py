"""One decoder layer: attention and feed-forward, each fed by a mix over depth."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from k3train.kernels.packing import Packing
from k3train.model.attn_res import DepthMix
from k3train.model.config import K3Config
from k3train.model.kda import KdaAttention
from k3train.model.mla import GatedMla
from k3train.model.mlp import SituMlp
from k3train.model.moe import LatentMoe
from k3train.model.norm import RmsNorm
from k3train.plan.counts import is_mla


class K3Layer(MegatronModule):
    """Decoder layer ``index`` (from 0, over the whole model) with attention residuals.

    Not a subclass of megatron-core's ``TransformerLayer``: that one adds every sublayer to one residual
    stream, and its recompute, offload and CUDA-graph options hang on the methods that would be replaced.
    """

    def __init__(self, config: K3Config, index: int, pg_collection: Any) -> None:
        super().__init__(config)
        self.tp_group = pg_collection.tp
        self.starts_block = index % config.k3.attn_res.block_layers == 0
        self.attention_mix = DepthMix(config)
        self.attention_norm = RmsNorm(config, config.k3.hidden_size)
        self.attention = make_attention(config, index, pg_collection)
        self.ffn_mix = DepthMix(config)
        self.ffn_norm = RmsNorm(config, config.k3.hidden_size)
        self.ffn = make_ffn(config, index, pg_collection)

    def forward(self, *sources: Tensor, packing: Packing) -> Tensor:
        """The new running prefix from the finished blocks and the running prefix, each [s, b, hidden].

        When the layer starts a block, the prefix it was given is finished and counts among the blocks from
        then on; ``advance`` keeps that account.
        """
        h = self.attention_norm(self.attention_mix(sources))
        attended, _ = self.attention(h, attention_mask=None, packed_seq_params=packing)
        sources = advance(
            sources, attended if self.starts_block else sources[-1] + attended, self.starts_block
        )
        h = self.ffn_norm(self.ffn_mix(sources))
        return sources[-1] + self.ffn(h, packed_seq_params=packing)[0]


def advance(sources: tuple[Tensor, ...], prefix: Tensor, starts_block: bool) -> tuple[Tensor, ...]:
    """Sources after a sublayer made ``prefix``: at a block's start the old prefix stays among them."""
    return (*sources, prefix) if starts_block else (*sources[:-1], prefix)


def make_attention(config: K3Config, index: int, pg_collection: Any) -> MegatronModule:
    """KDA or gated MLA, as the model's layer pattern says."""
    kind = GatedMla if is_mla(config.k3, index) else KdaAttention
    return kind(config, layer_number=index + 1, pg_collection=pg_collection)


def make_ffn(config: K3Config, index: int, pg_collection: Any) -> MegatronModule:
    """A dense feed-forward in the leading layers, the mixture of experts after them."""
    if index < config.k3.num_dense_layers:
        return SituMlp(config, config.k3.dense_ffn_size, pg_collection=pg_collection)
    return LatentMoe(config, layer_number=index + 1, pg_collection=pg_collection)
