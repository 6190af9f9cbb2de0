"""What layers of another model are given: hidden states, and documents in megatron-core's words."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from k3train.kernels.packing import Packing, make_packing


def check_hidden(x: Tensor, reader: Any) -> None:
    """Refuse ``x`` unless it is [s, b, hidden] in the dtype of the weight [m, hidden] of ``reader``, a linear
    that reads it; raises ValueError."""
    weight: Tensor = reader.weight
    hidden = weight.shape[-1]
    if x.ndim != 3 or x.shape[-1] != hidden:
        raise ValueError(f"hidden states have shape {tuple(x.shape)}: the layer needs [s, b, {hidden}]")
    if x.dtype is not weight.dtype:
        raise ValueError(
            f"hidden states are {x.dtype} and the layer's weights {weight.dtype}: cast one of them, as "
            "megatron-core's Float16Module does for a whole model"
        )


def as_packing(packed: Packing | PackedSeqParams | None, x: Tensor, cp: Any) -> Packing | None:
    """Document borders of ``x`` [s, b, hidden], this context-parallel rank's tokens. Raises ValueError."""
    if packed is None or isinstance(packed, Packing):
        return packed
    if cp.size() > 1:
        raise ValueError(
            "PackedSeqParams mean load-balanced shards under context parallelism, KDA needs contiguous ones: "
            "pass a k3train Packing as packed_seq_params"
        )
    padded = packed.cu_seqlens_q_padded
    cu_seqlens = padded if padded is not None else packed.cu_seqlens_q
    borders = [] if cu_seqlens is None else cu_seqlens.tolist()
    if len(borders) < 2:
        raise ValueError(
            f"cu_seqlens_q = {None if cu_seqlens is None else borders} names no document: give 0 and the end "
            "of each"
        )
    if borders[-1] < x.shape[0]:
        borders.append(x.shape[0])
    return make_packing(borders, torch.ones(x.shape[0], dtype=torch.bool), device=x.device)
