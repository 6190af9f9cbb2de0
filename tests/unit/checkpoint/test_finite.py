"""Which tensors of a model are not finite, and how often a device is waited for."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from k3train.checkpoint.finite import not_finite


class _Waits(TorchDispatchMode):
    """Counts numbers that are read from tensors, for each of which a GPU would be waited for."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_every_tensor_is_named_and_none_is_waited_for_alone() -> None:
    chunks = [nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3).bfloat16()), nn.Linear(2, 2, bias=False)]
    chunks[1].register_buffer("bounds", torch.tensor([1.0, -torch.inf]))
    chunks[1].register_buffer("counts", torch.tensor([1, 2]))
    with _Waits() as waits:
        assert not_finite(chunks, None) == ["bounds"]
        with torch.no_grad():
            chunks[0][1].weight.view(-1)[7] = torch.nan
            chunks[0][0].bias.fill_(torch.inf)
        assert not_finite(chunks, None) == ["0.bias", "1.weight", "bounds"]
    assert waits.count == 0
