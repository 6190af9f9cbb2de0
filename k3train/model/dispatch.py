"""How tokens reach the experts they were routed to, and how the experts' outputs come back."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
)
from torch import Tensor

from k3train.kernels.permute import SortedRoutes, permute, sort_routes, sort_weights, unpermute
from k3train.router.router import Routes


class Dispatched(NamedTuple):
    """Work for this rank's experts."""

    rows: Tensor
    """[t, latent], sorted by local expert."""
    counts: Tensor
    """int64 [local experts], on the host or the device: rows of each."""
    weights: Tensor
    """[t]: what each row's output counts."""


class Dispatch(Protocol):
    """Sends n tokens to experts, then sums what comes back. One ``combine`` follows each ``dispatch``."""

    def dispatch(self, tokens: Tensor, routes: Routes) -> Dispatched:
        """tokens [n, latent] -> rows where their experts are. Every rank of ep x etp must call this."""
        ...

    def combine(self, rows: Tensor) -> Tensor:
        """Experts' outputs, in the rows' order -> [n, latent]. Every rank of ep x etp must call this."""
        ...


def make_dispatch(config: Any, pg_collection: Any) -> Dispatch:
    """No communication on one expert rank, else what ``config.moe_token_dispatcher_type`` names."""
    if pg_collection.tp_ep.size() == 1:
        return LocalDispatch(config.k3.moe.num_experts)
    local = config.k3.moe.num_experts // pg_collection.ep.size()
    first = pg_collection.ep.rank() * local
    mine = list(range(first, first + local))
    match config.moe_token_dispatcher_type:
        case "alltoall":
            return AllToAllDispatch(local, mine, config=config, pg_collection=pg_collection)
        case "allgather":
            return AllGatherDispatch(local, mine, config=config, pg_collection=pg_collection)
        case other:
            raise ValueError(f"parallel.dispatcher={other} is unknown: use alltoall or allgather")


class LocalDispatch:
    """All experts on this rank: a sort, and no wait for the device."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self.order: SortedRoutes | None = None

    def dispatch(self, tokens: Tensor, routes: Routes) -> Dispatched:
        """Rows sorted by expert, then token; counts stay on the device."""
        self.order = order = sort_routes(routes.experts, self.num_experts)
        return Dispatched(permute(tokens, order), order.counts, sort_weights(routes.weights, order))

    def combine(self, rows: Tensor) -> Tensor:
        """Sum over each token's experts."""
        order, self.order = self.order, None
        assert order is not None
        return unpermute(rows, order)


class AllToAllDispatch(MoEAlltoAllTokenDispatcher):
    """megatron-core's all-to-all, with the permutation of this file.

    megatron-core's own sorts n*experts bits where this sorts n*k routes, and sums in bf16 in no fixed order.
    """

    order: SortedRoutes | None = None

    def dispatch(self, tokens: Tensor, routes: Routes) -> Dispatched:
        """Sort, exchange over ep, gather over etp, sort by local expert."""
        self.order = sort_routes(routes.experts, self.num_experts)
        self.probs = routes.weights  # megatron-core sums over etp in the dtype of this attribute
        chosen = torch.zeros(tokens.shape[0], self.num_experts, dtype=torch.bool, device=tokens.device)
        chosen.scatter_(1, routes.experts, True)
        self.tokens_per_expert = self.preprocess(chosen)
        point = "before_permutation_1"
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize(point, self.tokens_per_expert)
        weights = sort_weights(routes.weights, self.order)
        arrived = self.token_dispatch(permute(tokens, self.order), weights)
        rows, counts, received = self.dispatch_postprocess(*arrived)
        assert received is not None
        return Dispatched(rows, counts, received)

    def combine(self, rows: Tensor) -> Tensor:
        """The way back: reduce-scatter over etp, exchange over ep, sum over each token's experts."""
        order, self.order = self.order, None
        assert order is not None
        return unpermute(self.token_combine(self.combine_preprocess(rows)), order)


class AllGatherDispatch(MoEAllGatherTokenDispatcher):
    """megatron-core's all-gather: every rank sees all tokens of ep x etp and keeps those of its experts."""

    def dispatch(self, tokens: Tensor, routes: Routes) -> Dispatched:
        """Gather tokens, weights and routes over ep x etp, then take this rank's."""
        assert self.config.num_moe_experts is not None
        shape = (tokens.shape[0], self.config.num_moe_experts)
        chosen = torch.zeros(shape, dtype=torch.bool, device=tokens.device).scatter_(1, routes.experts, True)
        dense = torch.zeros(shape, dtype=routes.weights.dtype, device=tokens.device)
        dense = dense.scatter(1, routes.experts, routes.weights)
        gathered = self.token_dispatch(*self.dispatch_preprocess(tokens, chosen, dense))
        return Dispatched(*self.dispatch_postprocess(*gathered))

    def combine(self, rows: Tensor) -> Tensor:
        """Reduce-scatter the sums over ep x etp."""
        return self.combine_postprocess(self.token_combine(self.combine_preprocess(rows)))
