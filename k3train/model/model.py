"""One pipeline chunk of the whole model.

Legend: n tokens of the micro-batch buffer; a rank holds n/cp of them at the model's border and n/(tp*cp)
inside. Hidden states are [n/(tp*cp), 1, hidden].
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from k3train.kernels.packing import Packing
from k3train.model.attn_res import DepthMix
from k3train.model.block import K3Block
from k3train.model.config import K3Config
from k3train.model.embedding import TokenEmbedding
from k3train.model.head import OutputHead
from k3train.model.mtp import MtpLayer
from k3train.model.norm import RmsNorm
from k3train.model.payload import BlockCache, make_payload
from k3train.parallel.layout import Layout, chunk_layers


class K3Model(MegatronModule):
    """Embedding, decoder layers and head, or the part of them that one pipeline chunk holds.

    Not a subclass of megatron-core's ``GPTModel``, which builds its own ``TransformerBlock``, nor of
    ``LanguageModule``, whose embedding, rotary and loss options have no use here. It has what the pipeline
    schedules and ``finalize_model_grads`` ask a model for.
    """

    config: K3Config

    def __init__(
        self, config: K3Config, layout: Layout, chunk: int, cache: BlockCache, pg_collection: Any
    ) -> None:
        super().__init__(config)
        self.tp_group = pg_collection.tp
        self.vp_stage = chunk if layout.vp > 1 else None
        self.model_type = ModelType.encoder_or_decoder
        pp_rank = pg_collection.pp.rank()
        layers = chunk_layers(layout, pp_rank, chunk)
        self.payload = make_payload(config, layout, chunk * layout.pp + pp_rank)
        self.chunk, self.cache = chunk, cache
        self.pre_process = layers.start == 0
        self.post_process = layers.stop == config.k3.num_layers
        with_mtp = config.k3.mtp.num_layers > 0
        self.share_embeddings_and_output_weights = with_mtp and layout.pp > 1
        self._payload_in: Tensor | None = None

        if self.pre_process or (self.post_process and with_mtp):
            self.embedding = TokenEmbedding(
                config.k3.vocab_size,
                config.k3.hidden_size,
                init_method=config.embedding_init_method,  # type: ignore[arg-type]
                reduce_scatter_embeddings=config.sequence_parallel,
                config=config,
                tp_group=self.tp_group,
            )
        self.layers = K3Block(config, layers, pg_collection)
        if self.post_process:
            self.output_mix = DepthMix(config)
            self.final_norm = RmsNorm(config, config.k3.hidden_size)
            self.output_head = OutputHead(config, pg_collection)
            if with_mtp:
                self.mtp = MtpLayer(config, pg_collection)

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        """Take the payload from the previous chunk; pipeline schedules call this before ``forward``."""
        (self._payload_in,) = input_tensor

    def shared_embedding_or_output_weight(self) -> Tensor:
        """The embedding that the first and, for MTP, the last pipeline rank keep equal."""
        return self.embedding.weight

    def forward(
        self, tokens: Tensor, packing: Packing, labels: Tensor | None = None, labels_mtp: Tensor | None = None
    ) -> Tensor:
        """Run this chunk on a micro-batch; every rank of tp, cp and ep must call it together.

        tokens, labels, labels_mtp: int [1, n/cp], this context-parallel rank's share. The last chunk returns
        the loss of each token, fp32 [1, n/cp] and 0 where the label is ignored; with MTP [2, n/cp], the
        weighted loss of the token after next below: training takes the sum of all. Without labels it returns
        logits [1, n/cp, vocabulary]. Other chunks return the payload for the next one, [n/(tp*cp), 1, payload
        width].
        """
        kept = self.cache.take(self.chunk)
        if self.pre_process:
            sources: tuple[Tensor, ...] = (self._embed(tokens),)
        else:
            assert self._payload_in is not None, "set_input_tensor was not called"
            sources = self.payload.unpack(self._payload_in, kept)
            self._payload_in = None
        sources = self.layers(sources, packing)
        if not self.post_process:
            payload = self.payload.pack(sources, kept)
            self.cache.leave(self.chunk, kept)
            return payload
        hidden = self.output_mix(sources)
        out = self.output_head(self.final_norm(hidden), labels)
        if labels is None or labels_mtp is None or self.config.k3.mtp.num_layers == 0:
            return out
        # The last token of a document has no next token; it attends to nothing later and has no MTP label.
        upcoming = self._embed(labels.clamp(min=0))
        predicted = self.mtp(hidden, upcoming, packing=packing)
        return torch.cat([out, self.config.k3.mtp.loss_weight * self.output_head(predicted, labels_mtp)])

    def _embed(self, tokens: Tensor) -> Tensor:
        """int [1, n/cp] -> [n/(tp*cp), 1, hidden]."""
        embedded = self.embedding(tokens)
        return embedded if self.config.sequence_parallel else embedded.transpose(0, 1).contiguous()

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict | None = None,
    ) -> dict[str, Any]:
        """What a checkpoint holds of this chunk, under the same keys on every layout.

        The last pipeline rank's copy of the embedding (for MTP) is one more replica of the first's.
        """
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        key = f"{prefix}embedding.weight"
        if key in state and not self.pre_process:
            state[key].replica_id = (1, *state[key].replica_id[1:])
        return state
