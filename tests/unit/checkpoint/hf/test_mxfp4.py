"""Packed experts against scalar arithmetic in exact fractions, and what is refused."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from k3train.checkpoint.hf.mxfp4 import decode
from k3train.checkpoint.manifest import CheckpointError


def code_value(code: int) -> Fraction:
    """E2M1 by its definition: sign, exponent with bias 1, one mantissa bit; exponent 0 is subnormal."""
    exponent, mantissa = code >> 1 & 3, Fraction(code & 1, 2)
    size = mantissa if exponent == 0 else (1 + mantissa) * 2 ** (exponent - 1)
    return -size if code & 8 else size


def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of [out, in]: the smallest scale that holds each group, codes rounded to nearest."""
    values = [float(code_value(code)) for code in range(8)]
    rows, scales = [], []
    for row in weight.tolist():
        codes: list[int] = []
        for start in range(0, len(row), 32):
            group = row[start : start + 32]
            largest = max(map(abs, group))
            exponent = math.ceil(math.log2(largest / 6)) if largest else 0
            scales.append(exponent + 127)
            for value in group:
                size = abs(value) / 2.0**exponent
                nearest = min(range(8), key=lambda code: abs(values[code] - size))
                codes.append(nearest | (8 if value < 0 else 0))
        rows.append([low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)])
    packed = torch.tensor(rows, dtype=torch.uint8)
    return packed, torch.tensor(scales, dtype=torch.uint8).view(len(rows), -1)


@pytest.mark.parametrize("scale", [0, 1, 7, 100, 127, 128, 200, 252])
def test_every_byte_is_exact(scale: int) -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)
    decoded = decode(packed, torch.full((16, 1), scale, dtype=torch.uint8), "x")
    assert decoded.dtype == torch.bfloat16
    got = [Fraction(value) for value in decoded.float().flatten().tolist()]
    unit = Fraction(2) ** (scale - 127)
    want = [code_value(half) * unit for byte in range(256) for half in (byte & 15, byte >> 4)]
    assert got == want


def test_each_group_of_32_inputs_has_its_own_scale() -> None:
    packed = torch.full((2, 48), 0x22, dtype=torch.uint8)  # every code is 1
    scale = torch.tensor([[127, 128, 120], [126, 129, 130]], dtype=torch.uint8)
    decoded = decode(packed, scale, "x").float()
    assert decoded[:, ::32].tolist() == [[1.0, 2.0, 2.0**-7], [0.5, 4.0, 8.0]]
    assert torch.equal(decoded, decoded[:, ::32].repeat_interleave(32, 1))


def test_packing_costs_at_most_a_sixth_of_the_largest_weight_of_a_group() -> None:
    """The tolerance that docs/interop.md states, of what packing had rounded away."""
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(3)) * 0.02
    decoded = decode(*pack(weight), "x").float()
    error = (decoded - weight).view(8, 4, 32).abs().amax(-1)
    scales = pack(weight)[1].float().sub(127).exp2()
    assert (error <= scales).all()
    assert (scales <= 2 * weight.view(8, 4, 32).abs().amax(-1) / 6).all()
    assert (error > 0).all()


@pytest.mark.parametrize(
    ("packed", "scale", "words"),
    [
        ((4, 16), (4, 2), r"packed as \[4, 16\] need scales \[4, 1\], not \[4, 2\]"),
        ((4, 16), (3, 1), "need scales"),
        ((4, 15), (4, 1), "need scales"),
    ],
)
def test_scales_that_do_not_belong_to_the_codes(packed: tuple, scale: tuple, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        decode(torch.zeros(packed, dtype=torch.uint8), torch.zeros(scale, dtype=torch.uint8), "x")


@pytest.mark.parametrize("scale", [253, 254, 255])
def test_weights_that_are_not_finite_are_refused(scale: int) -> None:
    packed = torch.full((1, 16), 0x77, dtype=torch.uint8)  # 6
    with pytest.raises(CheckpointError, match="not finite"):
        decode(packed, torch.full((1, 1), scale, dtype=torch.uint8), "layer 3")
