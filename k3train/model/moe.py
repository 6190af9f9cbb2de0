"""Stable LatentMoE: routed experts in a narrow latent beside shared experts at full width."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from k3train.config.schema import Fp8, RouterInput
from k3train.kernels.beside import beside
from k3train.kernels.linear import linears
from k3train.kernels.packing import Packing
from k3train.kernels.recompute import make_again
from k3train.model.config import K3Config, fp8_recipe
from k3train.model.dispatch import make_dispatch
from k3train.model.experts import Experts
from k3train.model.mlp import SituMlp
from k3train.model.norm import RmsNorm
from k3train.model.parameters import replicated_linear
from k3train.model.projections import weight_for
from k3train.plan.counts import router_input_size
from k3train.router.contract import BalanceRule
from k3train.router.router import K3Router


class LatentMoe(MegatronModule):
    """y = shared(x) + up(norm(sum over chosen experts of weight * expert(down(x)))), k3 report eq. 11-13.

    The shared experts read x at full width, as does the router unless ``router.input`` is latent; tokens
    travel to the routed experts in the latent width. No token is dropped. ``layer_number`` names the layer in
    the balance metrics. ``selective``: activations, norms and gathered inputs are not kept for the backward
    pass.
    """

    def __init__(
        self, config: K3Config, layer_number: int, pg_collection: Any, *, selective: bool = False
    ) -> None:
        super().__init__(config)
        if pg_collection.tp.size() > 1 and not config.sequence_parallel:
            raise ValueError(
                f"sequence_parallel is off with {pg_collection.tp.size()} tensor-parallel ranks: each would "
                "send the same tokens to the experts; set sequence_parallel=True"
            )
        moe = config.k3.moe
        self.layer_number = layer_number
        self.tp_group = pg_collection.tp
        self.routes_latent = moe.router.input is RouterInput.latent
        self.router = K3Router(
            config,
            layer_number,
            pg_collection,
            settings=moe.router,
            input_size=router_input_size(config.k3),
        )
        self.latent_down = replicated_linear(config, config.hidden_size, moe.latent_size)
        self.experts = Experts(config, pg_collection, selective=selective)
        self.latent_norm = RmsNorm(config, moe.latent_size) if moe.latent_norm else torch.nn.Identity()
        self.latent_up = replicated_linear(config, moe.latent_size, config.hidden_size)
        shared_size = moe.num_shared_experts * moe.shared_ffn_size
        self.selective = selective
        self.shared = (
            SituMlp(config, shared_size, pg_collection, selective=selective) if shared_size else None
        )
        self.dispatch = make_dispatch(config, pg_collection)
        self.has_exchange = pg_collection.tp_ep.size() > 1
        # Transformer Engine's products share one workspace: two streams must not multiply at once.
        self.shares_beside = self.has_exchange and config.k3.fp8 is Fp8.none

    def forward(
        self, hidden: Tensor, padding_mask: Tensor | None = None, packed_seq_params: Any = None
    ) -> tuple[Tensor, None]:
        """[s, b, hidden] -> [s, b, hidden], s sharded over tp under sequence parallelism; no bias.

        Padding is kept out of the balance statistics: ``padding_mask``, bool [b, s] over this rank's tokens,
        is True on it as in megatron-core; without one, a ``Packing`` given as ``packed_seq_params`` tells.
        Every rank of tp, ep and etp must call this.
        """
        valid = self._valid(padding_mask, packed_seq_params)
        latent, shared = self._read(hidden)
        routes = self.router(latent if self.routes_latent else hidden, valid)
        rows, counts, weights = self.dispatch.dispatch(latent.view(-1, latent.shape[-1]), routes)
        combined = self.dispatch.combine(self.experts(rows, counts, weights)).view_as(latent)
        out = make_again(self.latent_norm, self.latent_up, combined, on=self.selective)
        return (out if shared is None else out + shared()), None

    def is_repeatable(self) -> bool:
        """Whether a pass is the same kernels every time, without work for the host or other ranks."""
        rule = type(self.router.rule)
        observes = rule.observe is not BalanceRule.observe or rule.loss is not BalanceRule.loss
        alone = self.tp_group.size() == 1 and not self.has_exchange
        return alone and not observes and self.router.audit is None

    def _read(self, hidden: Tensor) -> tuple[Tensor, Callable[[], Tensor] | None]:
        """The latent, and the shared experts' output for whoever asks for it."""
        if self.shared is not None and not self.shares_beside and self.shared.is_repeatable():
            # together, so that the gradient of their input is summed up inside the products
            weights = [weight_for(hidden, self.latent_down), *self.shared.inputs(hidden)]
            latent, *both = linears(hidden, weights, fp8_recipe(self.config))
            return latent, partial(self.shared.feed, *both)
        latent = self.latent_down(hidden)
        if self.shared is None:
            return latent, None
        return latent, beside(self._share, hidden, on=hidden.is_cuda and self.shares_beside)

    def _share(self, hidden: Tensor) -> Tensor:
        assert self.shared is not None
        return self.shared(hidden)[0]

    def _valid(self, padding_mask: Tensor | None, packed_seq_params: Any) -> Tensor | None:
        """bool [s*b] over this rank's tokens, False on padding."""
        if padding_mask is not None:
            return padding_mask.transpose(0, 1).reshape(-1).logical_not()
        if isinstance(packed_seq_params, Packing):
            return packed_seq_params.valid.chunk(self.tp_group.size())[self.tp_group.rank()]
        return None
