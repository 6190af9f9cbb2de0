"""The Kimi Delta Attention layer (k3 report section 2.1), heads sharded over tensor parallel ranks.

It is a megatron-core ``self_attention`` module. Under tensor parallelism the input is gathered along the
sequence once; projections then read it without collectives of their own, and one reduce-scatter in the
backward pass sums what they send back.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor, nn

from k3train.backend.wide import never_narrower
from k3train.config import schema
from k3train.kernels.gated_norm import gated_rms_norm
from k3train.kernels.kda.choose import kda
from k3train.kernels.kda.triton_kda import Keep
from k3train.kernels.linear import linear, linears
from k3train.kernels.main_grad import part_of
from k3train.kernels.packing import Packing
from k3train.kernels.recompute import make_again, sum_again
from k3train.kernels.short_conv import short_conv_parts
from k3train.model.config import fp8_recipe, part_settings
from k3train.model.inputs import as_packing, check_hidden
from k3train.model.parameters import replicated_linear
from k3train.model.projections import ColumnLinear, RowLinear, weight_for
from k3train.plan.recompute import head_slices

_HEAD_SHARDED = ("A_log", "dt_bias", "q_conv", "k_conv", "v_conv")
"""Own parameters of which each tensor-parallel rank holds its heads' rows."""


class KdaAttention(MegatronModule):
    """Linear attention with a per-channel bounded decay, short convolutions and an output gate.

    Settings come from ``settings``, else from ``config.k3.kda``. ``A_log``, ``dt_bias``, the convolutions and
    ``o_norm`` are fp32 whatever ``config.params_dtype`` is. ``selective``: gathered inputs, convolutions,
    decays and the gated output norm are not kept for the backward pass. ``again``: the whole layer is
    computed again right before its backward pass, so that memory kept in between is short-lived; of a long
    sequence some heads at a time.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        pg_collection: Any,
        *,
        settings: schema.Kda | None = None,
        selective: bool = False,
        again: bool = False,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.selective, self.again = selective, again
        # a layer made again has its backward pass right after; one that keeps little keeps no scores either
        self.keep: Keep = "operands" if again else "nothing" if selective else "scores"
        self.settings = part_settings(settings, config, "kda")
        self.layer_number = layer_number
        self.tp, self.cp = pg_collection.tp, pg_collection.cp
        heads = config.num_attention_heads
        if heads % self.tp.size():
            raise ValueError(f"{heads} heads cannot be shared by parallel.tp = {self.tp.size()} ranks")
        if self.tp.size() > 1 and not config.sequence_parallel:
            raise ValueError(
                "tensor parallel KDA needs sequence_parallel=True: its replicated weights rely on it"
            )
        self.local_heads = heads // self.tp.size()

        self._make_projections(config)
        self._make_head_parameters()
        # Replicated, but each rank's gradient covers only its own heads: megatron-core sums gradients of
        # parameters with this mark over tensor-parallel ranks, as it does of f_a's weight.
        self.o_norm.sequence_parallel = config.sequence_parallel  # pyright: ignore

    def _make_projections(self, config: TransformerConfig) -> None:
        init, init_out = config.init_method, config.output_layer_init_method
        assert init is not None
        assert init_out is not None
        hidden, heads = config.hidden_size, config.num_attention_heads
        width, rank = heads * self.settings.head_dim, self.settings.decay_rank
        # Columns read a tensor that is already gathered: they must neither gather nor reduce.
        plain = copy.copy(config)
        plain.sequence_parallel = False

        def column(inputs: int, outputs: int) -> ColumnLinear:
            return ColumnLinear(
                inputs,
                outputs,
                config=plain,
                init_method=init,
                bias=False,
                gather_output=False,
                disable_grad_reduce=True,
                tp_group=self.tp,
            )

        self.q_proj, self.k_proj, self.v_proj = (column(hidden, width) for _ in range(3))
        self.g_proj, self.b_proj, self.f_b = column(hidden, width), column(hidden, heads), column(rank, width)
        self.f_a = replicated_linear(config, hidden, rank)
        self.o_proj = RowLinear(
            width,
            hidden,
            config=config,
            init_method=init_out,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=self.tp,
        )

    def _make_head_parameters(self) -> None:
        def ones(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.ones(*shape, device=torch.cuda.current_device(), dtype=torch.float32))

        channels, taps = self.local_heads * self.settings.head_dim, self.settings.conv_kernel
        self.A_log, self.dt_bias = ones(self.local_heads), ones(channels)
        self.q_conv, self.k_conv, self.v_conv = (ones(channels, taps) for _ in range(3))
        self.o_norm = ones(self.settings.head_dim)
        for name in _HEAD_SHARDED:
            set_tensor_model_parallel_attributes(getattr(self, name), is_parallel=True, dim=0, stride=1)
        tracker = get_cuda_rng_tracker()
        assert tracker is not None
        with tracker.fork():
            self._initialise_heads()

    @torch.no_grad()
    def _initialise_heads(self) -> None:
        """A = 1, and a bias whose softplus is log-uniform: half-lives from 1.5 to 139 tokens at the defaults.

        k3 report section 2.1 with the bias of Mamba-2; a zero bias would forget everything within a token.
        Loading a checkpoint overwrites all of it.
        """
        self.A_log.zero_()
        low, high = math.log(self.settings.dt_min), math.log(self.settings.dt_max)
        dt = self.dt_bias.uniform_(low, high).exp()
        self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))
        bound = self.settings.conv_kernel**-0.5
        for weight in (self.q_conv, self.k_conv, self.v_conv):
            weight.uniform_(-bound, bound)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: Packing | PackedSeqParams | None = None,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        """Attend: [s, b, hidden] -> the same shape, and no bias.

        s is this rank's share of the sequence: contiguous over context parallel ranks and, inside each, over
        tensor parallel ranks. ``packed_seq_params`` tells documents apart (b = 1); without it each of the b
        rows is one document. Every rank of the tensor and context parallel groups must call this. Raises
        ValueError for another shape or dtype, and for documents that do not lie end to end from 0 on.
        """
        check_hidden(hidden_states, self.q_proj)
        if attention_mask is not None:
            raise ValueError(
                "KDA is causal by itself and cannot honour an attention_mask: pass None, and tell documents "
                "apart by packed_seq_params"
            )
        if unused.get("inference_context") is not None or unused.get("inference_params") is not None:
            raise ValueError("KdaAttention has no inference cache: call it without inference_context")
        gather = self.tp.size() > 1
        out = make_again(
            partial(gather_from_sequence_parallel_region, tensor_parallel_output_grad=True, group=self.tp)
            if gather
            else lambda x: x,
            lambda x: self._attend(x, as_packing(packed_seq_params, x, self.cp)),
            hidden_states,
            on=self.selective and gather,
        )
        return out, None

    def is_repeatable(self) -> bool:
        """Whether ``prepare`` and ``finish`` are the same kernels every time and send nothing."""
        return self.tp.size() == self.cp.size() == 1 and not (self.selective or self.again)

    def prepare(self, x: Tensor, packing: Packing) -> tuple[Tensor, ...]:
        """What is computed of x [s, 1, hidden] before ``attend``, and last the gate. Of ``packing`` only the
        tokens' positions matter."""
        *qkv, gate, beta, decay = self._project(_whole, x)
        return *self._mix(_whole, packing, *qkv, decay), beta, self._by_head(gate)

    def attend(self, *prepared: Tensor, packing: Packing | None) -> Tensor:
        """The recurrence over q, k, v, decay and beta: [b, s, heads, head_dim]."""
        return self._recur(_whole, packing, *prepared)

    def finish(self, o: Tensor, gate: Tensor) -> Tensor:
        """The layer's output [s, b, hidden] from those of ``attend`` and the gate."""
        return self.o_proj(self._norm(o, gate))[0]

    def _attend(self, x: Tensor, packing: Packing | None) -> Tensor:
        """x [s, b, hidden], s of all tensor parallel ranks -> this rank's share [s / tp, b, hidden]."""
        some = partial(self._heads, packing=packing)
        ranks = self.tp.size() * self.cp.size()
        parts = head_slices(self.local_heads, x.shape[0] * x.shape[1], ranks) if self.again else []
        return sum_again(some, parts, x) if len(parts) > 1 else some(None, x)

    def _heads(self, heads: tuple[int, int] | None, x: Tensor, *, packing: Packing | None) -> Tensor:
        """What all heads, or those of ``heads`` (first and number), contribute to the output."""
        own = _whole if heads is None else partial(_part, heads)
        *qkv, gate, beta, decay = self._project(own, x)

        def projected(o: Tensor) -> Tensor:
            if heads is None:
                return self.o_proj(o)[0]
            weight = own(weight_for(o, self.o_proj), self.settings.head_dim, 1)
            return linear(o, weight, fp8_recipe(self.config))

        o = make_again(
            partial(self._mix, own, packing),
            lambda *mixed: self._recur(own, packing, *mixed, beta),
            *qkv,
            decay,
            on=self.selective,
        )
        return make_again(self._norm, projected, o, self._by_head(gate), on=self.selective)

    def _project(self, own: Callable[..., Any], x: Tensor) -> list[Tensor]:
        """q, k, v, gate, beta and the narrow decay: each [b, s, channels]."""
        width = self.settings.head_dim
        wide = (self.q_proj, self.k_proj, self.v_proj, self.g_proj)
        inputs = [own(weight_for(x, module), width) for module in wide]
        inputs += [own(weight_for(x, self.b_proj), 1), weight_for(x, self.f_a)]
        # beta and the decay steer a state over thousands of tokens, and cost next to nothing: never in FP8
        made = linears(x, inputs, fp8_recipe(self.config), exact=2)
        *qkv_gate, beta, decay = (y.transpose(0, 1) for y in made)
        return [*qkv_gate, beta.contiguous(), decay]

    def _mix(
        self, own: Callable[..., Any], packing: Packing | None, *qkv_decay: Tensor
    ) -> tuple[Tensor, ...]:
        """q, k and v after their convolutions, and the decay: each [b, s, heads, head_dim]."""
        width, (*qkv, decay) = self.settings.head_dim, qkv_decay
        taps = torch.cat([own(taps, width) for taps in (self.q_conv, self.k_conv, self.v_conv)])
        mixed = short_conv_parts(tuple(qkv), taps, packing, self.cp)
        decay = linear(decay, own(weight_for(decay, self.f_b), width))
        return *(self._by_head(x) for x in mixed), self._by_head(decay)

    def _recur(self, own: Callable[..., Any], packing: Packing | None, *operands: Tensor) -> Tensor:
        q, k, v, z, beta = operands
        return kda(
            q,
            k,
            v,
            z,
            beta,
            own(self.A_log, 1),
            own(self.dt_bias, self.settings.head_dim),
            gate_lower_bound=self.settings.gate_lower_bound,
            packing=packing,
            cp_group=self.cp,
            keep=self.keep,
        )[0]

    def _norm(self, o: Tensor, gate: Tensor) -> Tensor:
        o = gated_rms_norm(o, self.o_norm, gate, self.settings.norm_eps)
        return o.flatten(2).transpose(0, 1).contiguous()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KdaAttention:
        """Projections are cast as asked, the layer's own parameters never to a narrower float."""
        if recurse:
            for child in self.children():
                child._apply(fn)
        return super()._apply(never_narrower(fn), recurse=False)

    def _by_head(self, x: Tensor) -> Tensor:
        """[b, s, heads * d] -> [b, s, heads, d]."""
        return x.unflatten(-1, (-1, self.settings.head_dim))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """megatron-core's description of the whole weights: plain tensors, so any TP degree can load them."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        own: dict[str, Any] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        sharded = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(_HEAD_SHARDED, 0),
            sharded_offsets,
            tp_group=self.tp,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, module in self.named_children():
            sharded.update(
                sharded_state_dict_default(
                    module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp
                )
            )
        return sharded


def _whole(weight: Any, size: int, dim: int = 0) -> Any:
    """All heads' part of a parameter."""
    return weight


def _part(heads: tuple[int, int], weight: Any, size: int, dim: int = 0) -> Tensor:
    """The part of some heads (first and number), of which each has ``size`` rows or columns."""
    return part_of(weight, dim, heads[0] * size, heads[1] * size)
