"""Balancing by an auxiliary loss (GShard arXiv:2006.16668 eq. 4, Switch arXiv:2101.03961 eq. 4)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor

from k3train.config import schema
from k3train.router.contract import BalanceRule


class AuxLossBalance(BalanceRule):
    """coefficient * E * sum_j f_j P_j: f_j expert j's share of choices, P_j its mean normalised score.

    Scores are sigmoids, divided by their sum for P as in DeepSeek-V3 (arXiv:2412.19437 eq. 17-20). The loss
    is a sum over tokens, as the language-model loss is, and is divided with it by the step's predicted
    tokens; P is linear in tokens, so that ranks and micro-batches simply add up, and all that depends on the
    cut is f. Over a micro-batch, f is counted over the tp x cp ranks that share it. Over the global batch (as
    arXiv:2501.11873 proposes) f is that of the step before, since the last micro-batch is not known when the
    first is differentiated; before the first step all experts are taken to be equal, which gives no gradient.
    """

    over_mean: Tensor
    """fp32 [experts]: load over mean load in the last step's global batch; in checkpoints."""

    def __init__(self, num_experts: int, settings: schema.AuxLoss, micro_batch_group: Any) -> None:
        super().__init__(num_experts)
        self.coefficient = settings.coefficient
        self.group = micro_batch_group
        self.pooled = settings.scope is schema.BalanceScope.global_batch
        if self.pooled:
            self.register_buffer("over_mean", torch.ones(num_experts, dtype=torch.float32))

    def loss(self, logits: Tensor, experts: Tensor, valid: Tensor | None) -> Tensor:
        """The loss of this rank's valid tokens of one micro-batch; every rank of tp x cp must call this."""
        scores = torch.sigmoid(logits)
        share = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        if valid is not None:
            share = share * valid.unsqueeze(-1)
        over_mean = self.over_mean if self.pooled else self._counted(experts, valid)
        return self.coefficient * (share.sum(0) * over_mean).sum()

    @torch.no_grad()
    def _counted(self, experts: Tensor, valid: Tensor | None) -> Tensor:
        one = torch.ones_like(experts) if valid is None else valid.unsqueeze(-1).expand_as(experts).long()
        loads = one.new_zeros(self.num_experts).scatter_add_(0, experts.reshape(-1), one.reshape(-1))
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(loads, group=self.group)
        return _over_mean(loads)

    @torch.no_grad()
    def next_bias(
        self, bias: Tensor, bounds: Tensor, loads: Tensor, statistics: Tensor, group: Any = None
    ) -> Tensor:
        """``bias`` itself; remembers the loads for the next step's loss."""
        if self.pooled:
            self.over_mean.copy_(torch.where(loads.sum() > 0, _over_mean(loads), self.over_mean))
        return bias


def with_loss(weights: Tensor, loss: Tensor) -> Tensor:
    """``weights``, whose backward pass also starts that of ``loss``, at the scale of the training loss."""
    return _WithLoss.apply(weights, loss)


class _WithLoss(torch.autograd.Function):
    """megatron-core's own does the same, but leaves a scale of another shape behind, on which its schedules
    then fail."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        scale = MoEAuxLossAutoScaler.main_loss_backward_scale  # schedules set it
        return grad, torch.ones_like(loss) if scale is None else scale.to(loss.dtype).reshape(())


def _over_mean(loads: Tensor) -> Tensor:
    """Loads over their mean, fp32 [experts]: f_j * E."""
    return (loads.double() * len(loads) / loads.sum().clamp(min=1)).float()
