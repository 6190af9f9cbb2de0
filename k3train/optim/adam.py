"""AdamW whose step count lives in the parameter group."""

from __future__ import annotations

from typing import Any

import torch


class GroupStepAdam(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019, algorithm 2) with ``step`` in the parameter group, as in FusedAdam.

    megatron-core's DistributedOptimizer expects that contract. With ``torch.optim.AdamW`` it gives all
    parameters one ``step`` tensor after a load, which then advances once per parameter: a wrong bias
    correction after every resume. Parameters, gradients and moments are fp32 and lie on one device.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        assert adam_w_mode, "only decoupled weight decay"
        assert not capturable, "CUDA graphs of the optimizer are not supported"
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient; a parameter without one keeps its value and moments."""
        assert closure is None
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(group, params)

    def _update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        for p in params:
            state = self.state[p]
            if "exp_avg" not in state:
                state["exp_avg"] = torch.zeros_like(p)
                state["exp_avg_sq"] = torch.zeros_like(p)
        step = torch.full((), float(group["step"]), device=params[0].device)
        torch._fused_adamw_(
            params,
            [p.grad for p in params if p.grad is not None],
            [self.state[p]["exp_avg"] for p in params],
            [self.state[p]["exp_avg_sq"] for p in params],
            [],
            [step] * len(params),
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )


def install() -> None:
    """Make megatron-core build GroupStepAdam where it would fall back to ``torch.optim.AdamW``.

    With Transformer Engine's or NVIDIA apex' FusedAdam importable, megatron-core uses that and nothing
    changes. (The PyPI package named apex is something else; it has no ``apex.optimizers``.)
    """
    import megatron.core.optimizer as core
    from megatron.core.optimizer import distrib_optimizer

    if not core.USING_PYTORCH_OPTIMIZER:
        return
    core.Adam = GroupStepAdam
    core.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.Adam = GroupStepAdam
    distrib_optimizer.HAVE_APEX_OR_TE = True
    distrib_optimizer.USING_APEX_OPTIMIZER = True
