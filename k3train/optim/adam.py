"""AdamW whose step count lives in the parameter group."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


class GroupStepAdam(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019, algorithm 2) with ``step`` in the parameter group, as in FusedAdam.

    megatron-core's DistributedOptimizer expects that contract. With ``torch.optim.AdamW`` it gives all
    parameters one ``step`` tensor after a load, which then advances once per parameter: a wrong bias
    correction after every resume. Parameters, gradients and moments are fp32 and lie on one device.
    """

    factor: float = 1.0
    """What gradients are multiplied by as a step reads them; whether it writes them back is left open."""

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
        self.copies: dict[Tensor, Tensor] = {}
        """On a GPU: bf16 tensors that a step sets to the new values of some parameters."""
        self._tables: dict[int, tuple[tuple[int, ...], Any]] = {}

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

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for p in params:
            state = self.state[p]
            if "exp_avg" not in state:
                state["exp_avg"] = torch.zeros_like(p)
                state["exp_avg_sq"] = torch.zeros_like(p)
        if params[0].is_cuda:
            for part in (
                [p for p in params if p in self.copies],
                [p for p in params if p not in self.copies],
            ):
                if part:
                    self._update_on_gpu(group, part)
            return
        step = torch.full((), float(group["step"]))
        torch._fused_adamw_(
            params,
            *self._operands(params),
            [],
            [step] * len(params),
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=None if self.factor == 1.0 else torch.tensor(1.0 / self.factor),
        )

    def _operands(self, params: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Gradients and both moments."""
        states = [self.state[p] for p in params]
        grads = [p.grad for p in params if p.grad is not None]
        return grads, [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states]

    def _update_on_gpu(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """One pass over memory: torch's would write scaled gradients back, and another round parameters."""
        from k3train.optim.triton_adam import Rates, Table

        operands = self._operands(params)
        copies = [self.copies[p] for p in params] if params[0] in self.copies else None
        key = tuple(x.data_ptr() for kind in (params, *operands) for x in kind)
        held, table = self._tables.get(key[0], (None, None))
        if held != key or table is None:
            table = Table(params, *operands, copies)
            self._tables[key[0]] = key, table
        (beta1, beta2), t = group["betas"], group["step"]
        table.step(
            Rates(
                factor=self.factor,
                rate=group["lr"] / (1.0 - beta1**t),
                decay=1.0 - group["lr"] * group["weight_decay"],
                beta1=beta1,
                beta2=beta2,
                root=1.0 / math.sqrt(1.0 - beta2**t),
                eps=group["eps"],
            )
        )


def set_factor(optimizer: Any, factor: float) -> None:
    """Have the next step of any optimizer take gradients times ``factor``: those with a ``factor``, all of
    ours, as they read them, others scaled in place before."""
    if hasattr(optimizer, "factor"):
        optimizer.factor = factor
    elif factor != 1.0:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor)


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
