"""The router of one MoE layer: which experts a token goes to, and with which weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_data_parallel_rng_tracker_name
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import router_gating_linear
from torch import Tensor, nn

from k3train.router.contract import BalanceRule, make_rule


class Routes(NamedTuple):
    """Where n tokens go."""

    experts: Tensor
    """int64 [n, top_k]: global expert indices, best first."""
    weights: Tensor
    """[n, top_k] in the router's dtype: how much each expert's output counts; a row sums to 1."""


class K3Router(MegatronModule):
    """Sigmoid scores of the full-width input; the selection bias decides who is chosen and nothing else.

    k3 report eq. 11 and 13: s = sigmoid(W x), chosen = top-k of s + bias, weight_j = s_j / sum of chosen s.
    ``config`` is a megatron-core config that carries ``k3``. Weight, bias and bounds stay fp32 when a wrapper
    casts the model to a narrower type. While training, every forward pass with gradients on adds its tokens
    to the step's statistics, so under full recomputation only the recomputed pass counts; ``update_biases``
    ends the step.
    """

    weight: Tensor
    """[experts, hidden], replicated."""
    bias: Tensor
    """fp32 [experts]: added to scores for selection; saved in checkpoints."""
    bounds: Tensor
    """fp32 [2]: smallest bias - 1 and largest bias + 1, between which every margin lies."""
    loads: Tensor
    """int64 [experts]: (token, choice) pairs of this rank's valid tokens in this step."""

    def __init__(self, config: Any, layer_number: int, pg_collection: Any = None) -> None:
        super().__init__(config)
        moe = config.k3.moe
        self.num_experts, self.top_k = moe.num_experts, moe.top_k
        self.layer_number = layer_number
        self.tp_group = pg_collection.tp if pg_collection is not None else None
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        fp32 = partial(torch.zeros, dtype=torch.float32, device=device)
        self.weight = nn.Parameter(fp32(moe.num_experts, config.hidden_size))
        if config.perform_initialization:
            tracker = get_cuda_rng_tracker()
            assert tracker is not None
            with tracker.fork(get_data_parallel_rng_tracker_name()):
                nn.init.normal_(self.weight, std=config.k3.init_std)
        # Under sequence parallelism tp ranks see different tokens: megatron-core sums such gradients over tp.
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
        self.register_buffer("bias", fp32(moe.num_experts))
        self.register_buffer("bounds", torch.tensor([-1.0, 1.0], dtype=torch.float32, device=device))
        self.register_buffer("loads", fp32(moe.num_experts).long(), persistent=False)
        self.rule: BalanceRule = make_rule(moe.router, moe.num_experts, moe.top_k).to(self.weight.device)

    def forward(self, hidden: Tensor, valid: Tensor | None = None) -> Routes:
        """Route ``hidden`` [..., hidden], flattened to n tokens; ``valid``, bool [n], is False on padding.

        Padding is routed like any token but not counted. No gradient flows through the choice or the bias.
        """
        tokens = hidden.reshape(-1, hidden.shape[-1])
        scores = torch.sigmoid(router_gating_linear(tokens, self.weight, None, self.weight.dtype))
        with torch.no_grad():
            # One more than is used: the first expert not chosen is the bar the others were measured against.
            best = (scores + self.bias).topk(min(self.top_k + 1, self.num_experts), dim=-1)
            experts = best.indices[:, : self.top_k]
        if self.training and torch.is_grad_enabled():
            self._count(scores.detach(), best.values[:, -1], experts, valid)
        chosen = scores.gather(-1, experts)
        return Routes(experts, chosen / (chosen.sum(-1, keepdim=True) + 1e-20))

    @torch.no_grad()
    def _count(self, scores: Tensor, cutoff: Tensor, experts: Tensor, valid: Tensor | None) -> None:
        one = torch.ones_like(experts) if valid is None else valid.unsqueeze(-1).expand_as(experts).long()
        self.loads.scatter_add_(0, experts.reshape(-1), one.reshape(-1))
        self.rule.observe(scores, cutoff, valid, self.bounds)

    @torch.no_grad()
    def set_bias(self, bias: Tensor) -> None:
        """Take ``bias`` [experts] for the coming forward passes."""
        self.bias.copy_(bias)
        self.bounds.copy_(torch.stack((self.bias.min() - 1, self.bias.max() + 1)))

    def reset(self) -> None:
        """Forget what this step's tokens did."""
        self.loads.zero_()
        self.rule.reset()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> K3Router:
        """Move as asked, but refuse narrower floats: megatron-core's bf16 wrapper casts whole models."""

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.is_floating_point() and moved.dtype.itemsize < tensor.dtype.itemsize:
                return tensor.to(moved.device)
            return moved

        return super()._apply(move, recurse)
