"""A sigmoid gate on every channel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3train.backend.derivative import once_differentiable
from k3train.kernels.rms_norm import as_rows


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), both [..., c], in fp32 and rounded to the dtype of ``gate`` (k3 report eq. 7).

    bf16 on a GPU is one kernel in each direction, and keeps only the inputs for the backward pass.
    """
    if x.is_cuda and x.dtype is gate.dtype is torch.bfloat16:
        return _SigmoidGate.apply(x, gate)  # pyright: ignore[reportReturnType]
    return (x.float() * torch.sigmoid(gate.float())).to(gate.dtype)


class _SigmoidGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        from k3train.kernels import triton_gate

        ctx.save_for_backward(x, gate)
        return triton_gate.forward(as_rows(x), as_rows(gate)).view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        from k3train.kernels import triton_gate

        x, gate = ctx.saved_tensors
        grad_x, grad_gate = triton_gate.backward(as_rows(grads[0]), as_rows(x), as_rows(gate))
        return grad_x.view(x.shape), grad_gate.view(gate.shape)
