"""One-rank weights and gradients against their shards in any layout, through ``sharded_state_dict``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from torch import Tensor, nn

Shard = tuple[str, tuple[int, ...], tuple[int, ...], Tensor]
"""Key, shape of the whole tensor, offset of this part in it, the part."""


def shards(modules: Iterable[nn.Module], groups: Any, *, of_gradients: bool = False) -> list[Shard]:
    """This rank's part of every parameter and persistent buffer, or of every parameter's gradient.

    Gradients are ``main_grad`` where there is one. Parameters without a gradient are left out.
    """
    out: list[Shard] = []
    for module in modules:
        parameters = dict(module.named_parameters())
        values = {name: p.data for name, p in parameters.items()}
        absent = set(dict(module.named_buffers())) if of_gradients else set()
        if of_gradients:
            for name, p in parameters.items():
                grad = getattr(p, "main_grad", p.grad)
                absent |= {name} if grad is None else set()
                p.data = torch.zeros_like(p) if grad is None else grad.detach().clone().to(p.dtype)
        state = module.sharded_state_dict(metadata={"dp_cp_group": groups.pg.dp_cp})
        out += [shard for shard in parts_of(state) if shard[0] not in absent]
        for name, p in parameters.items():
            p.data = values[name]
    return out


def parts_of(state: dict[str, Any]) -> list[Shard]:
    """The tensors in a sharded state dict."""
    apply_factories(state)
    return [
        (t.key, tuple(t.global_shape), tuple(t.global_offset), t.data.detach())
        for t in nested_values(state)
        if isinstance(t, ShardedTensor)
    ]


def whole(parts: Iterable[Shard]) -> dict[str, Tensor]:
    """Whole tensors from all ranks' parts; parts that overlap must agree, and every element must be given."""
    out: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    for key, shape, offset, part in parts:
        if key not in out:
            out[key], seen[key] = part.new_zeros(shape), torch.zeros(shape, dtype=torch.bool)
        place, known = _view(out[key], offset, part), _view(seen[key], offset, part)
        torch.testing.assert_close(place[known], part[known], rtol=1e-5, atol=1e-7, msg=f"replicas of {key}")
        place.copy_(part)
        known.fill_(True)
    missing = [key for key, known in seen.items() if not known.all()]
    assert not missing, f"elements that no rank holds: {missing}"
    return out


def load(modules: Iterable[nn.Module], groups: Any, values: dict[str, Tensor]) -> set[str]:
    """Copy whole tensors into this rank's parts; returns the keys that were needed."""
    keys = set()
    for key, _, offset, part in shards(modules, groups):
        part.copy_(_view(values[key], offset, part))
        keys.add(key)
    return keys


def _view(tensor: Tensor, offset: tuple[int, ...], part: Tensor) -> Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))]
