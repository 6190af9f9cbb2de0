"""One decoder layer: attention and feed-forward, each fed by a mix over depth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from k3train.config.schema import Recompute
from k3train.kernels.graphed import Graphed
from k3train.kernels.packing import Packing
from k3train.kernels.recompute import again, make_again
from k3train.model.attn_res import DepthMix
from k3train.model.config import K3Config
from k3train.model.kda import KdaAttention
from k3train.model.mla import GatedMla
from k3train.model.mlp import SituMlp
from k3train.model.moe import LatentMoe
from k3train.model.norm import RmsNorm
from k3train.plan.counts import is_mla
from k3train.plan.pieces import PIECE_TOKENS

REPLAYS_ATTENTION = True
"""Replay what lies around attention too, not feed-forwards alone."""


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
        self.recompute_attention, self.recompute_ffn = config.recompute.of_layer(config.k3, index)
        self.recompute_all = self.recompute_attention is self.recompute_ffn is Recompute.full
        self.on_host = config.recompute.on_host
        self.attention = make_attention(config, index, pg_collection)
        self.ffn_mix = DepthMix(config)
        self.ffn_norm = RmsNorm(config, config.k3.hidden_size)
        self.ffn = make_ffn(config, index, pg_collection)
        self.graphs = config.cuda_graphs and self.recompute_ffn is Recompute.none
        before, after = [self.attention_mix, self.attention_norm], [self.ffn_mix, self.ffn_norm, self.ffn]
        self.begun = Graphed([*before, self.attention], pool="begun")
        self.fed = Graphed([self.attention, *after], pool="fed")

    def forward(self, *sources: Tensor, packing: Packing) -> Tensor:
        """The new running prefix from the finished blocks and the running prefix, each [s, b, hidden].

        When the layer starts a block, the prefix it was given is finished and counts among the blocks from
        then on; ``advance`` keeps that account. With full recomputation only ``sources`` are kept, all but
        one of which other layers keep anyway.
        """
        forward = partial(self._forward, packing=packing)
        return again(forward, *sources, on=self.recompute_all, on_host=self.on_host)

    def _forward(self, *sources: Tensor, packing: Packing) -> Tensor:
        replays = self.graphs and self.ffn.is_repeatable()
        around = replays and REPLAYS_ATTENTION and self.attention.is_repeatable()
        if around and not self.attention._forward_hooks:  # whoever looks at single modules sees it as one
            return self._replayed(*sources, packing=packing)
        attend, feed = partial(self._attend, packing=packing), partial(self._feed, packing=packing)
        half = not self.recompute_all
        full = half and self.recompute_attention is Recompute.full
        attended = again(attend, *sources, on=full, on_host=self.on_host)
        sources = advance(
            sources, attended if self.starts_block else sources[-1] + attended, self.starts_block
        )
        if replays:
            return self.fed(self._fed, *sources, packing.valid)
        if works_in_pieces(self.recompute_ffn, sources[-1]):
            return in_pieces(self._fed, *sources, own_valid(packing, self.tp_group))
        full = half and self.recompute_ffn is Recompute.full
        return sources[-1] + again(feed, *sources, on=full, on_host=self.on_host)

    def _replayed(self, *sources: Tensor, packing: Packing) -> Tensor:
        """As ``_forward``: only what follows the borders of documents is launched kernel by kernel."""
        *made, gate = self.begun(partial(self._begun, packing=packing), *sources, packing.position)
        attended = self.attention.attend(*made, packing=packing)
        return self.fed(self._ended, attended, gate, *sources, packing.valid)

    def _begun(self, *sources_position: Tensor, packing: Packing) -> tuple[Tensor, ...]:
        """What attention needs, and its gate, of tensors alone: sources and the tokens' positions."""
        *sources, position = sources_position
        hidden = self.attention_norm(self.attention_mix(tuple(sources)))
        return self.attention.prepare(hidden, replace(packing, position=position))

    def _ended(self, attended: Tensor, gate: Tensor, *sources_valid: Tensor) -> Tensor:
        """The prefix after the layer, from attention's result on."""
        *sources, valid = sources_valid
        prefix = self.attention.finish(attended, gate)
        prefix = prefix if self.starts_block else sources[-1] + prefix
        return self._fed(*advance(tuple(sources), prefix, self.starts_block), valid)

    def _fed(self, *sources_valid: Tensor) -> Tensor:
        """The prefix after the feed-forward, of tensors alone: sources, and bool [s], False on padding."""
        *sources, valid = sources_valid
        hidden = self.ffn_norm(self.ffn_mix(tuple(sources)))
        return sources[-1] + self.ffn(hidden, padding_mask=valid.logical_not()[None])[0]

    def _attend(self, *sources: Tensor, packing: Packing) -> Tensor:
        return make_again(
            lambda *sources: self.attention_norm(self.attention_mix(sources)),
            lambda h: self.attention(h, attention_mask=None, packed_seq_params=packing)[0],
            *sources,
            on=self.recompute_attention is Recompute.selective,
        )

    def _feed(self, *sources: Tensor, packing: Packing) -> Tensor:
        return make_again(
            lambda *sources: self.ffn_norm(self.ffn_mix(sources)),
            lambda h: self.ffn(h, packed_seq_params=packing)[0],
            *sources,
            on=self.recompute_ffn is Recompute.selective,
        )


def advance(sources: tuple[Tensor, ...], prefix: Tensor, starts_block: bool) -> tuple[Tensor, ...]:
    """Sources after a sublayer made ``prefix``: at a block's start the old prefix stays among them."""
    return (*sources, prefix) if starts_block else (*sources[:-1], prefix)


def works_in_pieces(policy: Recompute, x: Tensor) -> bool:
    """Whether a feed-forward on ``x`` [s, b, hidden] takes ``in_pieces``."""
    return policy is Recompute.full and x.shape[0] > PIECE_TOKENS


def in_pieces(feed: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """``feed(*inputs)``, piece by piece along their first axis and each made again right before its backward
    pass, so that only one piece's values exist at once."""
    pieces = zip(*(x.split(PIECE_TOKENS) for x in inputs), strict=True)
    return torch.cat([again(feed, *piece, on=True) for piece in pieces])


def own_valid(packing: Packing, tp_group: Any) -> Tensor:
    """bool [s]: which of the tokens that a rank has between sublayers are not padding."""
    return packing.valid.chunk(tp_group.size())[tp_group.rank()]


def make_attention(config: K3Config, index: int, pg_collection: Any) -> KdaAttention | GatedMla:
    """KDA or gated MLA, as the model's layer pattern says."""
    kind = GatedMla if is_mla(config.k3, index) else KdaAttention
    recompute = config.recompute.of_layer(config.k3, index)[0]
    return kind(
        config,
        layer_number=index + 1,
        pg_collection=pg_collection,
        selective=recompute is Recompute.selective,
        again=recompute is Recompute.full,
    )


def make_ffn(config: K3Config, index: int, pg_collection: Any) -> SituMlp | LatentMoe:
    """A dense feed-forward in the leading layers, the mixture of experts after them."""
    selective = config.recompute.of_layer(config.k3, index)[1] is Recompute.selective
    if index < config.k3.num_dense_layers:
        return SituMlp(config, config.k3.dense_ffn_size, pg_collection, selective=selective)
    return LatentMoe(config, index + 1, pg_collection, selective=selective)
