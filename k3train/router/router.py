"""The router of one MoE layer: which experts a token goes to, and with which weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_data_parallel_rng_tracker_name
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from k3train.backend.wide import never_narrower
from k3train.config import schema
from k3train.router.audit import Audit
from k3train.router.aux_loss import with_loss
from k3train.router.choose import make_rule
from k3train.router.logits import router_logits
from k3train.router.select import Tally, select
from k3train.router.weights import route_weights


class Routes(NamedTuple):
    """Where n tokens go."""

    experts: Tensor
    """int64 [n, top_k]: global expert indices, best first."""
    weights: Tensor
    """[n, top_k] in the router's dtype: how much each expert's output counts; a row sums to 1."""


class K3Router(MegatronModule):
    """Sigmoid scores of each token; the selection bias decides who is chosen and nothing else.

    k3 report eq. 11 and 13: s = sigmoid(W x), chosen = top-k of s + bias, weight_j = s_j / sum of chosen s.
    ``config`` is megatron-core's; its ``num_moe_experts`` and ``moe_router_topk`` are read. ``input_size`` is
    the width of x, ``config.hidden_size`` when not given. Weight, bias and bounds stay fp32 when a wrapper
    casts the model to a narrower type. While training, every forward pass with gradients on adds its tokens
    to the step's statistics, so under full recomputation only the recomputed pass counts; ``update_biases``
    ends the step.
    """

    weight: Tensor
    """[experts, input], replicated."""
    bias: Tensor
    """fp32 [experts]: added to scores for selection; saved in checkpoints."""
    bounds: Tensor
    """fp32 [2]: ends of the margins' histogram in this step."""
    loads: Tensor
    """int64 [experts]: (token, choice) pairs of this rank's valid tokens in this step."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        pg_collection: Any = None,
        *,
        settings: schema.Router,
        input_size: int | None = None,
    ) -> None:
        super().__init__(config)
        self.num_experts, self.top_k = config.num_moe_experts, config.moe_router_topk
        self.layer_number = layer_number
        self.settings = settings
        self.tp_group = pg_collection.tp if pg_collection is not None else None
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        fp32 = partial(torch.zeros, dtype=torch.float32, device=device)
        self.weight = nn.Parameter(fp32(self.num_experts, input_size or config.hidden_size))
        if config.perform_initialization:
            tracker = get_cuda_rng_tracker()
            assert tracker is not None
            with tracker.fork(get_data_parallel_rng_tracker_name()):
                config.init_method(self.weight)
        # Under sequence parallelism tp ranks see different tokens: megatron-core sums such gradients over tp.
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
        shared_by = pg_collection.tp_cp if pg_collection is not None else None
        self.rule = make_rule(settings, self.num_experts, self.top_k, shared_by).to(self.weight.device)
        self.audit: Audit | None = None
        """Set before a step, looks at it more closely and is gone after it."""
        self.register_buffer("bias", fp32(self.num_experts))
        self.register_buffer("bounds", self.rule.bounds(self.bias))
        self.register_buffer("loads", fp32(self.num_experts).long(), persistent=False)

    def forward(self, tokens: Tensor, valid: Tensor | None = None) -> Routes:
        """Route ``tokens`` [..., input], flattened to n; ``valid``, bool [n], is False on padding.

        Padding is routed like any token but not counted. No gradient flows through the choice or the bias.
        """
        flat = tokens.reshape(-1, tokens.shape[-1])
        logits = router_logits(flat, self.weight)
        counting = self.training and torch.is_grad_enabled()
        tally = Tally(self.loads, self.rule.histogram, self.bounds, valid) if counting else None
        experts, cutoff = select(logits.detach(), self.bias, self.top_k, tally)
        weights = route_weights(logits, experts)
        if counting:
            self.rule.observe(logits.detach(), cutoff, valid)
            if self.audit is not None:
                self.audit.observe(logits.detach(), cutoff, valid)
            loss = self.rule.loss(logits, experts, valid)
            if loss is not None:
                weights = with_loss(weights, loss)
        return Routes(experts, weights)

    def reset(self) -> None:
        """Forget what this step's tokens did."""
        self.loads.zero_()
        self.rule.reset()
        self.audit = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> K3Router:
        return super()._apply(never_narrower(fn), recurse)
