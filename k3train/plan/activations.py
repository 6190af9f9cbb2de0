"""Bytes that a rank keeps of a micro-batch between its forward and its backward pass. No torch.

Counted by reading what the layers' operations save on a GPU, rows of experts as if routing were even. Small
things are left out: routers' logits, norms' scales, borders of documents.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3train.config.schema import Model, Precision, Recompute
from k3train.parallel.layout import Layout, chunk_layers
from k3train.plan.borders import borders, message_sources, num_sources
from k3train.plan.counts import is_mla
from k3train.plan.pieces import CHUNK_ELEMENTS, KDA_CHUNK, KEPT_ELEMENTS, PIECE_TOKENS
from k3train.plan.queries import head_parts
from k3train.plan.recompute import RecomputePlan, head_slices

_FP32 = 4
_ROUTE_BYTES = 24
"""Of one choice of a token: expert (int64), its place among the rows (int64), score and weight (fp32)."""
_WHOLE = (Recompute.full, Recompute.full)
_HOPPER_HEAD = 128
"""Channels of a head that KDA's kernels for Hopper take; others compute scores again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What the backward pass of a sublayer reads, in bytes of one micro-batch on one rank."""

    results: int
    """Kept under ``selective`` too."""
    remade: int
    """What ``selective`` computes again."""
    passing: int
    """Gradients and work space that come and go while the backward pass is in this sublayer."""

    def under(self, policy: Recompute) -> int:
        """Bytes kept from the forward to the backward pass."""
        return {Recompute.none: self.results + self.remade, Recompute.selective: self.results}.get(policy, 0)

    def again_under(self, policy: Recompute) -> int:
        """Bytes that are there once more while the backward pass is in this sublayer."""
        return self.results + self.remade - self.under(policy)


def pinned_bytes(size: int) -> int:
    """What torch takes for ``size`` bytes of pinned memory: a power of two."""
    return 1 << (size - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Activations:
    """Arithmetic of one model on one layout with micro-batches of one size."""

    model: Model
    layout: Layout
    recompute: RecomputePlan
    buffer_tokens: int
    """Tokens of a micro-batch, over all ranks."""
    cuda_graphs: bool = False
    """Whether layers are replayed as CUDA graphs where that can be."""

    @property
    def width(self) -> int:
        """Bytes of one element."""
        return 2 if self.model.precision is Precision.bf16 else 4

    @property
    def gathered(self) -> int:
        """Tokens that a rank has where it holds only its heads: those of its tensor-parallel group."""
        return self.buffer_tokens // self.layout.cp

    @property
    def own(self) -> int:
        """Tokens that a rank has between sublayers."""
        return self.gathered // self.layout.tp

    @property
    def hidden(self) -> int:
        """Bytes of one hidden state between sublayers."""
        return self.own * self.model.hidden_size * self.width

    def chunk(self, pp_rank: int, chunk: int) -> int:
        """Bytes kept of one micro-batch in one chunk, what came over the border before it included."""
        position = chunk * self.layout.pp + pp_rank
        last = position == self.layout.pp * self.layout.vp - 1
        crossed = borders(self.layout, self.model.attn_res.block_layers)
        arrived = crossed[position - 1].sent if position else 1
        layers = sum(self.layer(layer) for layer in chunk_layers(self.layout, pp_rank, chunk))
        here = 0 if self.recompute.on_host else arrived * self.hidden
        return layers + here + (self.ends() if last else 0)

    def on_host(self, pp_rank: int, chunk: int) -> int:
        """Bytes of the host that keep inputs of one micro-batch in one chunk.

        A layer, or a half of one, adds one hidden state to those that earlier ones keep.
        """
        if not self.recompute.on_host:
            return 0
        states = 0
        for layer in chunk_layers(self.layout, pp_rank, chunk):
            policies = self.recompute.of_layer(self.model, layer)
            states += 1 if policies == _WHOLE else policies.count(Recompute.full)
        if states:
            position = chunk * self.layout.pp + pp_rank
            crossed = borders(self.layout, self.model.attn_res.block_layers)
            states += crossed[position - 1].sent - 1 if position else 0
        return states * pinned_bytes(self.hidden)

    def layer(self, layer: int) -> int:
        """Bytes kept of one decoder layer: of both sublayers, and the prefix that each adds to."""
        policies = self.recompute.of_layer(self.model, layer)
        prefixes = 1 if policies == _WHOLE else 2
        if self.recompute.on_host:
            prefixes = sum(policy is not Recompute.full for policy in policies)
        kept = sum(part.under(p) for part, p in zip(self.sublayers(layer), policies, strict=True))
        return kept + prefixes * self.hidden

    def recorded(self) -> int:
        """Bytes that CUDA graphs keep beside the values of a pass: what each gives as gradients, of the
        sources twice a layer, of attention's result and of its gate; and a place for that result."""
        layout = self.layout
        if not self.cuda_graphs or max(layout.tp, layout.cp, layout.pp, layout.ep, layout.etp) > 1:
            return 0
        places = 0
        for layer in range(self.model.num_layers):
            if self.recompute.of_layer(self.model, layer) == (Recompute.none, Recompute.none):
                width = self.model.mla.v_head_dim if is_mla(self.model, layer) else self.model.kda.head_dim
                places += 2 * self.sources(layer) + 3 * self.own * self.model.num_heads * width * self.width
        return places

    def sublayers(self, layer: int) -> tuple[Kept, Kept]:
        """Attention and feed-forward of one decoder layer."""
        dense = layer < self.model.num_dense_layers
        attention = self._mla() if is_mla(self.model, layer) else self._kda()
        return attention, self._dense(self.model.dense_ffn_size) if dense else self._moe()

    def sources(self, done: int) -> int:
        """Bytes of what the depth mix after ``done`` layers reads."""
        return num_sources(self.model.attn_res.block_layers, done) * self.hidden

    def ends(self) -> int:
        """Bytes kept after the last layer: the head's input, and the MTP layer with the head's second."""
        head = 3 * self.hidden  # mix and norm over depth, the head's input
        if self.recompute.on_host:
            head += self.sources(self.model.num_layers)  # others keep them on the host
        if not self.model.mtp.num_layers:
            return head
        mla, moe = self.recompute.mla, self.recompute.moe
        # Next token's embedding and last norm's output; then both norms' and three sums.
        own = 2 if mla is moe is Recompute.full else 7
        return head + self._mla().under(mla) + self._moe().under(moe) + own * self.hidden

    def working(self, pp_rank: int) -> int:
        """Bytes that come and go in the backward pass at its fullest, beside all that ``chunk`` counts.

        They are what one sublayer, or one layer, computes again and its gradients; or, in the output head,
        logits and what stands for the gradient of its weight.
        """
        chunks = [chunk_layers(self.layout, pp_rank, chunk) for chunk in range(self.layout.vp)]
        again = max((self._in_layer(layer) for layers in chunks for layer in layers), default=0)
        if pp_rank < self.layout.pp - 1:
            return again
        rows = self.model.vocab_size // self.layout.tp
        at_once = CHUNK_ELEMENTS if self.recompute.saves_memory else KEPT_ELEMENTS
        logits = min(at_once, self.gathered * rows) * self.width
        if self.model.mtp.num_layers and not self.recompute.saves_memory:
            logits *= 2
        weight = rows * self.model.hidden_size * self.width
        head = logits + weight + self.gathered * self.model.hidden_size * self.width
        return max(again - self.ends(), head)  # what the head kept is gone by then

    def forward(self, pp_rank: int) -> int:
        """Bytes of a pass without gradients at its fullest: sources and what one sublayer makes of them, or
        the head's logits; and, of the other micro-batches of a group, what waits for the rank's next chunk.

        A message that has arrived stays whole while one of its blocks does.
        """
        blocks = self.model.attn_res.block_layers
        chunks = [chunk_layers(self.layout, pp_rank, chunk) for chunk in range(self.layout.vp)]
        inside = [self.sources(layer + 1) + self._made_in(layer) for layers in chunks for layer in layers]
        if pp_rank == self.layout.pp - 1:
            logits = min(CHUNK_ELEMENTS, self.gathered * self.model.vocab_size // self.layout.tp)
            head = (logits + self.gathered * self.model.hidden_size) * self.width
            inside.append(self.sources(self.model.num_layers) + head)
        waiting = 0
        for chunk, layers in enumerate(chunks[:-1]):
            waiting += num_sources(blocks, layers.stop) - num_sources(blocks, layers.start)
            waiting += message_sources(self.layout, blocks) if chunk + pp_rank else 0
        return max(inside) + (self.layout.pp - 1) * waiting * self.hidden

    def _made_in(self, layer: int) -> int:
        """What the fuller sublayer of a layer computes in a pass without gradients, and its result."""
        attention, ffn = (part.results + part.remade for part in self.sublayers(layer))
        policies = self.recompute.of_layer(self.model, layer)
        heads = self.model.num_heads // self.layout.tp
        if policies[0] is Recompute.full:
            slices = head_slices(heads, self.gathered, self.layout.tp * self.layout.cp)
            attention = attention * slices[0][1] // heads
        if policies[1] is Recompute.full:
            ffn = ffn * min(PIECE_TOKENS, self.own) // self.own
        return max(attention, ffn) + self.hidden

    def _in_layer(self, layer: int) -> int:
        """What comes and goes while the backward pass is in one layer."""
        policies = self.recompute.of_layer(self.model, layer)
        pairs = zip(self.sublayers(layer), policies, strict=True)
        again, passing = zip(*((part.again_under(p), part.passing) for part, p in pairs), strict=True)
        if policies[1] is Recompute.full and self.own > PIECE_TOKENS:
            again, passing = (
                (attention, ffn * PIECE_TOKENS // self.own) for attention, ffn in (again, passing)
            )
        if policies != _WHOLE:
            return max(a + p for a, p in zip(again, passing, strict=True))
        heads = self.model.num_heads // self.layout.tp
        slices = head_slices(heads, self.gathered, self.layout.tp * self.layout.cp)
        # Gradients of the layer's result and of the other sources, and those that the feed-forward sends to
        # all sources; the results of both halves, attention's input and two gradients of it.
        held = 2 * self.sources(layer) + 5 * self.hidden
        if self.recompute.on_host:
            held += self.sources(layer)
        if len(slices) > 1:  # then the halves do not meet
            some = (again[0] - self._input() + passing[0]) * slices[0][1] // heads
            return held + max(some, again[1] + passing[1])
        return held + sum(again) + max(passing)

    def _input(self, gathered_once: bool = True) -> int:
        """What a sublayer makes of its sources: their mix and its norm, gathered where it is kept so."""
        tokens = self.gathered if gathered_once and self.layout.tp > 1 else self.own
        return self.hidden + tokens * self.model.hidden_size * self.width

    def _kda(self) -> Kept:
        heads = self.model.num_heads // self.layout.tp
        channels = heads * self.model.kda.head_dim
        # q, k, v before the convolution, output, gate; low-rank decay; beta
        results = 5 * channels + self.model.kda.decay_rank + heads
        remade = 5 * channels  # q, k, v, decay, normed output
        scores = self.gathered * heads * self._scores()
        # Per tile: three operands as wide as a head, two squares, and two more for scores that are not kept;
        # states and their gradients; corrections.
        kernels = 3 * channels + (2 if scores else 4) * heads * KDA_CHUNK
        kernels += 2 * channels * self.model.kda.head_dim // KDA_CHUNK + channels
        gradients = 5 * channels  # of q, k, v, the decay and the output
        return Kept(
            results=self.gathered * results * self.width,
            remade=self.gathered * remade * self.width + scores + self._input(),
            passing=self.gathered * (kernels + gradients) * self.width,
        )

    def _scores(self) -> int:
        """Bytes a token and head that KDA's kernels for Hopper keep beside inputs and output: two squares,
        the decay over each chunk, two inverse norms and beta."""
        if self.model.precision is not Precision.bf16 or self.model.kda.head_dim != _HOPPER_HEAD:
            return 0
        return 2 * KDA_CHUNK * self.width + _FP32 * _HOPPER_HEAD // KDA_CHUNK + 3 * _FP32

    def _mla(self) -> Kept:
        mla, layout, width = self.model.mla, self.layout, self.width
        heads = self.model.num_heads // layout.tp
        own_heads = heads // head_parts(heads, layout.cp)
        latent = mla.kv_lora_rank + mla.qk_shared_head_dim
        values = self.gathered * heads * mla.v_head_dim
        # Attention's output, before and after the exchange over cp, and the gate; the log-sum-exp.
        results = (2 + (layout.cp > 1)) * values * width + self.gathered * heads * _FP32
        results += self.own * (mla.q_lora_rank + latent) * width
        queries = self.gathered * heads * (mla.qk_head_dim + mla.qk_shared_head_dim)
        keys = self.buffer_tokens * own_heads * (mla.qk_head_dim + mla.qk_shared_head_dim)
        expanded = self.buffer_tokens * own_heads * (mla.qk_head_dim + mla.v_head_dim)
        narrow = self.own * mla.q_lora_rank + self.buffer_tokens * latent
        # The gate is applied in fp32.
        remade = (queries + keys + expanded + narrow) * width + values * (2 * _FP32 + width)
        passing = (queries + keys + expanded + 2 * values) * width
        return Kept(results=results, remade=remade + self._input(gathered_once=False), passing=passing)

    def _dense(self, ffn_size: int) -> Kept:
        inner = self.gathered * (ffn_size // self.layout.tp) * self.width
        return Kept(results=2 * inner, remade=inner + self._input(), passing=3 * inner)

    def _moe(self) -> Kept:
        moe, width = self.model.moe, self.width
        choices = self.own * moe.top_k
        rows, inner = choices * self.layout.etp, moe.expert_ffn_size // self.layout.etp
        latent = self.own * moe.latent_size
        results = (rows * (moe.latent_size + 2 * inner) + latent) * width + choices * _ROUTE_BYTES
        shared = self._dense(moe.num_shared_experts * moe.shared_ffn_size)
        remade = (rows * inner + latent) * width
        if self.layout.tp > 1:  # the experts read a rank's own tokens, and the shared ones gathered ones
            remade += self.hidden
        passing = rows * (moe.latent_size + 3 * inner) * width
        return Kept(results=results + shared.results, remade=remade + shared.remade, passing=passing)
