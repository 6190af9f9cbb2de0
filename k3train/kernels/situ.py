"""SiTU-GLU: the gated activation of every feed-forward in K3 (k3 report eq. 12, 18-19)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3train.backend.derivative import once_differentiable


def situ_glu(
    gate: Tensor, up: Tensor, gate_cap: float, up_cap: float, weight: Tensor | None = None
) -> Tensor:
    """gate_cap*tanh(gate/gate_cap)*sigmoid(gate) * up_cap*tanh(up/up_cap), times ``weight`` for each row.

    ``gate`` and ``up`` are [..., channels]; ``weight``, one number per row, is [...]. Computed in fp32 (fp64
    for fp64 inputs) and returned as [..., channels] in the dtype of ``gate``. The backward pass keeps only
    the three inputs and computes the rest again. Raises ValueError for shapes that do not belong together.
    """
    if gate.shape != up.shape or (weight is not None and weight.shape != gate.shape[:-1]):
        given = "" if weight is None else f", weight {tuple(weight.shape)}"
        raise ValueError(
            f"gate has shape {tuple(gate.shape)}, up {tuple(up.shape)}{given}: situ_glu needs gate and up "
            "[..., channels] alike, and weight [...], one number per row"
        )
    return _SituGlu.apply(gate, up, gate_cap, up_cap, weight)


def _is_fused(x: Tensor) -> bool:
    """One kernel instead of some twenty passes over memory; fp32 runs keep libm's last digits."""
    return x.is_cuda and x.dtype is torch.bfloat16


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()


class _SituGlu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, gate_cap: float, up_cap: float, weight: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        ctx.caps = gate_cap, up_cap
        if _is_fused(gate):
            from k3train.kernels import triton_situ

            return triton_situ.forward(gate, up, gate_cap, up_cap, weight)
        g = _wide(gate)
        out = torch.tanh(g / gate_cap).mul_(gate_cap).mul_(torch.sigmoid(g))
        out.mul_(torch.tanh(_wide(up) / up_cap).mul_(up_cap))
        if weight is not None:
            out.mul_(weight.unsqueeze(-1))
        return out.to(gate.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, Tensor | None]:
        gate, up, weight = ctx.saved_tensors
        gate_cap, up_cap = ctx.caps
        if _is_fused(gate):
            from k3train.kernels import triton_situ

            grads = triton_situ.backward(grad, gate, up, gate_cap, up_cap, weight)
            return grads[0], grads[1], None, None, grads[2]
        g, grad = _wide(gate), _wide(grad)
        tanh_g, sigmoid_g = torch.tanh(g / gate_cap), torch.sigmoid(g)
        tanh_u = torch.tanh(_wide(up) / up_cap)
        a = gate_cap * tanh_g * sigmoid_g
        b = up_cap * tanh_u
        grad_weight = None
        if weight is not None:
            grad_weight = (grad * a * b).sum(-1).to(weight.dtype)
            grad = grad * weight.unsqueeze(-1)
        slope = (1 - tanh_g.square()) * sigmoid_g + a * (1 - sigmoid_g)
        grad_gate = (grad * b * slope).to(gate.dtype)
        grad_up = (grad * a * (1 - tanh_u.square())).to(up.dtype)
        return grad_gate, grad_up, None, None, grad_weight
