"""Expert matrices as the release packs them: OCP MXFP4, decoded by table and so without rounding.

A code is E2M1 (sign, two exponent bits, one mantissa bit), two to a byte with the even input in the low half.
Each 32 consecutive inputs of a row share a scale, E8M0: the byte e stands for 2^(e - 127), and 255 for NaN.
bf16 holds every product of the two exactly, so decoding has no tolerance; what packing had rounded away stays
lost, at most one scale per weight, a sixth of the largest weight of the group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3train.checkpoint.hf.names import MXFP4_GROUP
from k3train.checkpoint.manifest import CheckpointError

_CODES = torch.tensor(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
)
_BYTES = torch.stack([_CODES.repeat(16), _CODES.repeat_interleave(16)], dim=-1)
"""[256, 2]: the two values of each byte, low half first."""
_SCALES = torch.tensor([2.0 ** (byte - 127) for byte in range(255)] + [float("nan")])


def decode(packed: Tensor, scale: Tensor, name: str) -> Tensor:
    """bf16 [out, in] from codes uint8 [out, in / 2] and scales uint8 [out, in / 32].

    Raises CheckpointError when the two do not belong together or hold what bf16 does not.
    """
    rows, inputs = packed.shape[0], 2 * packed.shape[-1]
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise CheckpointError(f"{name}: packed weights and scales must be uint8")
    if inputs % MXFP4_GROUP or scale.shape != (rows, inputs // MXFP4_GROUP):
        raise CheckpointError(
            f"{name}: weights packed as {list(packed.shape)} need scales {[rows, inputs // MXFP4_GROUP]}, "
            f"not {list(scale.shape)}"
        )
    values = _BYTES[packed.int()].view(rows, -1, MXFP4_GROUP) * _SCALES[scale.int()].unsqueeze(-1)
    if not torch.isfinite(values).all():
        raise CheckpointError(f"{name}: a scale gives weights that are not finite")
    return values.view(rows, inputs).bfloat16()
