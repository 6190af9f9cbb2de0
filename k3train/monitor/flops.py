"""How fast a step multiplies: the model's own arithmetic over time, and over what the device could do."""

from __future__ import annotations

from k3train.config.schema import Model
from k3train.plan.counts import train_flops_per_token

_BF16_PEAK = {"H100": 989e12, "H200": 989e12}
"""FLOP/s of dense bf16 products by NVIDIA's data sheets, for the full modules (SXM, GH200)."""
_OTHERS = ("PCIe", "NVL", "MIG")
"""Boards and slices of these chips that are slower."""


def model_tflops(
    model: Model, *, tokens: int, document_tokens: float, seconds: float, ranks: int
) -> float | None:
    """The model's TFLOP/s on each of ``ranks`` in a step of ``tokens`` that took ``seconds``; None if 0.

    FLOPs are those of ``train_flops_per_token``, once forward and backward: recomputation, a pass that is
    computed again and evaluation add time and no FLOPs. MLA's attention is counted within documents: with
    their lengths n_i, ``document_tokens`` is sum n_i^2 / sum n_i, the length of the document of a token on
    average, in which the FLOPs are linear. Padding is computed, and counts, as one document a sequence.
    """
    if seconds <= 0:
        return None
    return train_flops_per_token(model, document_tokens) * tokens / seconds / ranks / 1e12


def bf16_peak(device_name: str | None) -> float | None:
    """Dense bf16 FLOP/s of an H100 or H200 by the name that CUDA gives it; None for every other device."""
    if device_name is None or any(other in device_name for other in _OTHERS):
        return None
    return next((peak for chip, peak in _BF16_PEAK.items() if chip in device_name), None)
