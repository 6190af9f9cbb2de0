"""Which kernels a run takes, in words, for the record of the run."""

from __future__ import annotations

import torch

from k3train.config import schema
from k3train.config.fp8_rules import MULTIPLE
from k3train.kernels.kda.choose import choose


def describe_kernels(model: schema.Model, device: torch.device) -> dict[str, str]:
    """The path of each kind of layer that has a choice, and the reason for it."""
    dtype = torch.bfloat16 if model.precision is schema.Precision.bf16 else torch.float32
    fast, reason = choose(device, dtype, model.kda.head_dim, model.kda.gate_lower_bound)
    found = {"kda": f"{'Hopper kernels' if fast else 'chunked torch'}: {reason}"}
    if model.fp8 is not schema.Fp8.none:
        unit = MULTIPLE[model.fp8]
        found["projections"] = f"FP8, {model.fp8.value}: those whose sides are multiples of {unit}, else bf16"
    return found
