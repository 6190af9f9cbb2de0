"""The rate of the model's arithmetic, and what it is compared with."""

from __future__ import annotations

import pytest

from k3train.config.schema import Model
from k3train.monitor.flops import bf16_peak, model_tflops
from k3train.plan.counts import train_flops_per_token


def test_packed_documents_count_as_much_as_each_alone() -> None:
    model, lengths = Model(), [100, 28, 1000, 3000]
    alone = sum(n * train_flops_per_token(model, n) for n in lengths)
    tokens = sum(lengths)
    mean = sum(n * n for n in lengths) / tokens
    rate = model_tflops(model, tokens=tokens, document_tokens=mean, seconds=0.5, ranks=8)
    assert rate == pytest.approx(alone / 0.5 / 8 / 1e12)
    assert alone < 0.999 * tokens * train_flops_per_token(model, tokens)
    assert model_tflops(model, tokens=tokens, document_tokens=mean, seconds=0.0, ranks=8) is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A100-SXM4-80GB", None),
        (None, None),
    ],
)
def test_the_peak_is_known_for_the_full_hopper_modules_alone(name: str | None, peak: float | None) -> None:
    assert bf16_peak(name) == peak
