"""Causal attention of MLA, the product of scores and values alone: k3train, Automodel, megatron-core."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3train.bench.place import Cannot, Case, Place, alone, gradients
from k3train.bench.work import Shape
from k3train.config import schema
from k3train.kernels.attention import attention, causal_mask


def case(by: str, s: Shape, place: Place) -> Case:
    """Documents of equal length."""
    n, h = s["tokens"], s["heads"]
    q, k, v = place.randn(n, h, s["qk"]), place.randn(n, h, s["qk"]), place.randn(n, h, s["v"])
    grad = torch.randn_like(v)
    documents = s["documents"]
    borders = tuple(n * i // documents for i in range(documents + 1))
    make = {"k3train": _ours, "megatron": _megatron, "automodel": _automodel}[by]
    run, note = make(q, k, v, borders, place)
    return Case(forward=run, both=lambda: gradients(run(), [q, k, v], grad), note=note)


def _ours(q: Tensor, k: Tensor, v: Tensor, borders: tuple[int, ...], place: Place) -> Any:
    scale = q.shape[-1] ** -0.5
    return lambda: attention(q, k, v, borders, scale), ""


def _automodel(q: Tensor, k: Tensor, v: Tensor, borders: tuple[int, ...], place: Place) -> Any:
    """What its sdpa backend calls; it packs documents by a dense mask."""
    mask = None if len(borders) == 2 else causal_mask(borders, q.device)

    def run() -> Tensor:
        rows = [x.transpose(0, 1)[None] for x in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(
            *rows, attn_mask=mask, is_causal=mask is None, scale=q.shape[-1] ** -0.5
        )
        return out[0].transpose(0, 1)

    return run, "torch chooses the kernel" if mask is None else "dense mask"


def _megatron(q: Tensor, k: Tensor, v: Tensor, borders: tuple[int, ...], place: Place) -> Any:
    if len(borders) > 2:
        raise Cannot("DotProductAttention refuses packed sequences")
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    heads = q.shape[1]
    groups = alone(schema.Model(), place.device).groups
    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads * v.shape[-1],
        num_attention_heads=heads,
        kv_channels=v.shape[-1],
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        attention_softmax_in_fp32=True,
        bf16=place.dtype is torch.bfloat16,
        params_dtype=place.dtype,
    )
    core = DotProductAttention(
        config, 1, AttnMaskType.causal, "self", softmax_scale=q.shape[-1] ** -0.5, pg_collection=groups.pg
    )
    mask = ~causal_mask(borders, q.device)[None, None]

    def run() -> Tensor:
        return core(q[:, None], k[:, None], v[:, None], mask)[:, 0].view_as(v)

    return run, "all scores in memory, softmax in fp32"
