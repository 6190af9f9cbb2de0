"""Gated multi-head latent attention without positions.

Legend: n tokens of the micro-batch buffer, h heads; tp and cp are numbers of ranks. A rank holds n/(tp*cp)
consecutive tokens between sublayers. Inside, heads are sharded over tp, and for the softmax over tp*p, p the
largest number that divides h/tp and cp: a context-parallel rank attends over the whole buffer for its own
heads, and where p < cp, with cp/p ranks to the same heads, for its share of the queries. Ranks then do equal
work whatever the documents' lengths, and one contiguous token order serves every layer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from k3train.kernels.attention import attention, attention_of_ranges
from k3train.kernels.gate import sigmoid_gate
from k3train.kernels.keys import keys_and_values
from k3train.kernels.linear import linear, linears
from k3train.kernels.main_grad import part_of
from k3train.kernels.max_logits import max_logits, max_logits_of_ranges
from k3train.kernels.packing import Packing
from k3train.kernels.recompute import make_again, sum_again
from k3train.model.config import K3Config, fp8_recipe
from k3train.model.norm import RmsNorm
from k3train.model.parameters import replicated_linear
from k3train.model.projections import ColumnLinear, RowLinear
from k3train.model.query_shares import QueryShares
from k3train.parallel.collectives import all_gather, all_to_all
from k3train.plan.queries import head_parts
from k3train.plan.recompute import head_slices


class _KvUp(ColumnLinear):
    """kv_b: each context-parallel rank expands the latent for its own heads only."""

    def forward(self, latent: Tensor, first: int, rows: int) -> Tensor:  # type: ignore[override]
        """latent [n, c], whole on every rank, times ``rows`` rows of this tp shard from ``first`` on."""
        assert self.weight is not None
        whole = rows == self.weight.shape[0]
        weight = self.weight if whole else self.weight[first : first + rows]
        return linear(latent, weight, fp8_recipe(self.config))


class GatedMla(MegatronModule):
    """Gated MLA (k3 report eq. 7): low-rank queries, one key/value latent, a sigmoid gate on every channel.

    A module of its own, since megatron-core's MLA cannot be built without Transformer Engine, gathers neither
    packed documents nor context parallelism on the CPU, and knows no gate. Heads must divide by tp.
    ``selective``: queries, keys, values and the gated output are not kept for the backward pass. ``again``:
    the whole layer is computed again right before its backward pass; of a long sequence some heads at a time.
    """

    def __init__(
        self,
        config: K3Config,
        layer_number: int,
        pg_collection: Any,
        *,
        selective: bool = False,
        again: bool = False,
        **_: Any,
    ) -> None:
        super().__init__(config)
        mla, heads = config.k3.mla, config.k3.num_heads
        self.layer_number = layer_number
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        self.local_heads = heads // self.tp_group.size()
        self.parts = head_parts(self.local_heads, self.cp_group.size())
        self.own_heads = self.local_heads // self.parts
        self.nope, self.shared, self.value = mla.qk_head_dim, mla.qk_shared_head_dim, mla.v_head_dim
        self.latent = mla.kv_lora_rank
        self.selective, self.again = selective, again
        self.scale = (self.nope + self.shared) ** -0.5
        self.max_logits: Tensor | None = None
        """fp32 [heads / tp]: largest logits since the last reset, of the heads that this rank attends for."""
        hidden = config.k3.hidden_size

        def column(inputs: int, outputs: int, kind: type = ColumnLinear) -> Any:
            return kind(
                inputs,
                outputs,
                config=config,
                init_method=config.init_method,
                bias=False,
                tp_group=self.tp_group,
            )

        self.q_a = replicated_linear(config, hidden, mla.q_lora_rank)
        self.q_a_norm = RmsNorm(config, mla.q_lora_rank, mla.norm_eps)
        self.q_b = column(mla.q_lora_rank, heads * (self.nope + self.shared))
        self.kv_a = replicated_linear(config, hidden, self.latent + self.shared)
        self.kv_a_norm = RmsNorm(config, self.latent, mla.norm_eps)
        self.kv_b = column(self.latent, heads * (self.nope + self.value), _KvUp)
        self.g_proj = column(hidden, heads * self.value)
        self.o_proj = RowLinear(
            heads * self.value,
            hidden,
            config=config,
            init_method=config.output_layer_init_method,  # type: ignore[arg-type]
            bias=False,
            input_is_parallel=True,
            skip_bias_add=False,
            tp_group=self.tp_group,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: None = None,
        packed_seq_params: Packing | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Attend within documents. Every rank of tp and cp must call this.

        ``hidden_states`` [n/(tp*cp), 1, hidden] and so is the result. ``packed_seq_params`` gives the
        documents of the whole buffer; None means that it is one document.
        """
        assert hidden_states.shape[1] == 1, hidden_states.shape
        if packed_seq_params is None:
            borders = (0, hidden_states.shape[0] * self.tp_group.size() * self.cp_group.size())
        else:
            borders = packed_seq_params.cu_seqlens
        ranks = self.tp_group.size() * self.cp_group.size()
        parts = head_slices(self.local_heads, hidden_states.shape[0], ranks) if self.again else []
        if len(parts) > 1:
            narrow = linears(hidden_states, [self.q_a.weight, self.kv_a.weight], fp8_recipe(self.config))
            return sum_again(partial(self._heads, borders=borders), parts, hidden_states, *narrow), None
        shares = None
        if self.parts < self.cp_group.size():
            shares = QueryShares(self.cp_group, self.local_heads, borders)
        query, latent, gate = self._project(hidden_states)
        out = make_again(
            lambda query, latent: (self._queries(query, shares), *self._keys_and_values(latent)),
            lambda q, k, v: self._softmax(q, k, v, borders, shares),
            query,
            latent,
            on=self.selective,
        )
        if shares is None:
            out = all_to_all(out, self.cp_group, split_dim=0, concat_dim=1)  # [n/cp, h/tp, value]
        else:
            out = shares.gather(out)
        return self.finish(out, gate), None

    def is_repeatable(self) -> bool:
        """Whether ``prepare`` and ``finish`` are the same kernels every time and send nothing."""
        return self.tp_group.size() == self.cp_group.size() == 1 and not (self.selective or self.again)

    def prepare(self, hidden: Tensor, packing: Packing) -> tuple[Tensor, ...]:
        """q, k, v [n, heads, .] and the gate [n, 1, .] of hidden [n, 1, hidden], whatever the documents."""
        query, latent, gate = self._project(hidden)
        return self._queries(query, None), *self._keys_and_values(latent), gate

    def attend(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> Tensor:
        """Softmax attention within documents: [n, heads, value]."""
        return self._softmax(q, k, v, packing.cu_seqlens, None)

    def finish(self, out: Tensor, gate: Tensor) -> Tensor:
        """The layer's output [n/(tp*cp), 1, hidden] from attention's and the gate."""
        return make_again(
            sigmoid_gate, lambda x: self.o_proj(x)[0], out.reshape(gate.shape), gate, on=self.selective
        )

    def _softmax(
        self, q: Tensor, k: Tensor, v: Tensor, borders: tuple[int, ...], shares: QueryShares | None
    ) -> Tensor:
        self._observe(q, k, borders, shares)
        if shares is None:
            return attention(q, k, v, borders, self.scale, selective=self.selective)
        return attention_of_ranges(q, k, v, borders, shares.ranges, self.scale, selective=self.selective)

    def _heads(
        self,
        heads: tuple[int, int],
        hidden: Tensor,
        query: Tensor,
        narrow: Tensor,
        *,
        borders: tuple[int, ...],
    ) -> Tensor:
        """What the heads of ``heads`` (first and number) contribute to the output, on the only rank of tp and
        cp; ``query`` and ``narrow`` are the compressed queries, keys and values."""
        first, count = heads

        def own(module: Any, size: int, dim: int = 0) -> Tensor:
            return part_of(module.weight, dim, first * size, count * size)

        recipe = fp8_recipe(self.config)
        q = linear(self.q_a_norm(query), own(self.q_b, self.nope + self.shared), recipe)
        q = q.view(-1, count, self.nope + self.shared)
        latent, shared = narrow.split([self.latent, self.shared], dim=-1)
        kv = linear(self.kv_a_norm(latent), own(self.kv_b, self.nope + self.value), recipe)
        k, v = keys_and_values(kv.flatten(0, 1), shared.flatten(0, 1), count, self.nope)
        self._observe(q, k, borders, None, first)
        gate = linear(hidden, own(self.g_proj, self.value), recipe)
        o = attention(q, k, v, borders, self.scale)
        return linear(sigmoid_gate(o.reshape(gate.shape), gate), own(self.o_proj, self.value, dim=1), recipe)

    def _project(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Compressed queries, compressed keys and values, and the output's gate, which tp may gather for."""
        narrow, recipe = [self.q_a.weight, self.kv_a.weight], fp8_recipe(self.config)
        if self.tp_group.size() == 1:
            return linears(hidden, [*narrow, self.g_proj.weight], recipe)
        return *linears(hidden, narrow, recipe), self.g_proj(hidden)[0]

    def track_logits(self) -> None:
        """From now on keep the largest logit of each head over all training passes (see ``max_logits``).

        Passes without gradient do not count: evaluation, and the first of the two under full recomputation.
        """
        device = torch.cuda.current_device()
        self.max_logits = torch.full((self.local_heads,), float("-inf"), dtype=torch.float32, device=device)

    def clip_factors(self, gamma: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Weights that make queries and keys, each with a factor per row that shrinks head h's logits by
        ``gamma`` [heads / tp]; the key channels that all heads share stay (QK-Clip, arXiv:2507.20534)."""
        root, one = gamma.sqrt(), torch.ones_like(gamma)
        q_rows = torch.cat([root[:, None].expand(-1, self.nope), gamma[:, None].expand(-1, self.shared)], 1)
        kv_rows = torch.cat([root[:, None].expand(-1, self.nope), one[:, None].expand(-1, self.value)], 1)
        return [(self.q_b.weight, q_rows.flatten()), (self.kv_b.weight, kv_rows.flatten())]

    def _observe(
        self, q: Tensor, k: Tensor, borders: tuple[int, ...], shares: QueryShares | None, first: int = 0
    ) -> None:
        """Note the largest logits of a pass with gradient; ``first`` of this rank's heads are others."""
        if self.max_logits is None or not self.training or not torch.is_grad_enabled():
            return
        first += self.cp_group.rank() % self.parts * self.own_heads
        own = self.max_logits[first : first + q.shape[1]]
        with torch.no_grad():
            if shares is None:
                largest = max_logits(q, k, borders, self.scale)
            else:
                largest = max_logits_of_ranges(q, k, borders, shares.ranges, self.scale)
            own.copy_(torch.maximum(own, largest))

    def _queries(self, compressed: Tensor, shares: QueryShares | None) -> Tensor:
        """[n/(tp*cp), 1, q_lora] -> [rows, h/(tp*p), nope + shared], n rows without ``shares``."""
        q, _ = self.q_b(self.q_a_norm(compressed))
        q = q.view(q.shape[0], self.local_heads, self.nope + self.shared)
        if shares is not None:
            return shares.scatter(q)
        return all_to_all(q, self.cp_group, split_dim=1, concat_dim=0)

    def _keys_and_values(self, narrow: Tensor) -> tuple[Tensor, Tensor]:
        """k [n, h/(tp*p), nope + shared] and v [n, h/(tp*p), value] from ``narrow`` [n/(tp*cp), 1, 576]."""
        latent, shared = narrow.split([self.latent, self.shared], dim=-1)
        latent, shared = self._gathered(self.kv_a_norm(latent), shared)
        rows = self.own_heads * (self.nope + self.value)
        kv = self.kv_b(latent, self.cp_group.rank() % self.parts * rows, rows)
        return keys_and_values(kv, shared, self.own_heads, self.nope)

    def _gathered(self, latent: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """[n/(tp*cp), 1, .] -> [n, .]: the whole buffer's compressed keys and values."""
        if self.tp_group.size() == self.cp_group.size() == 1:
            return latent.flatten(0, 1), shared.flatten(0, 1)
        narrow = torch.cat([latent, shared], dim=-1)
        if self.config.sequence_parallel:
            # Heads differ over tp, so the gradients that come back to the latent are partial sums.
            narrow = gather_from_sequence_parallel_region(
                narrow, tensor_parallel_output_grad=True, group=self.tp_group
            )
        narrow = all_gather(narrow.flatten(0, 1), self.cp_group)
        latent, shared = narrow.split([self.latent, self.shared], dim=-1)
        return latent, shared
