"""What recordings share and what passes beside them must not take from them; the graphs need a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from k3train.kernels.graphed import Graphed, _memory


def test_only_recordings_in_the_order_of_the_model_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    first, second, third = (Graphed([], pool="in order").number for _ in range(3))
    shared = _memory("in order", second)
    assert _memory("in order", third) is shared
    assert _memory("in order", first) is not shared
    assert _memory("another", first) is not shared


def test_a_launched_pass_adds_gradients_that_replayed_ones_had_added() -> None:
    """megatron-core's hook drops a gradient while the parameter is noted as done."""
    module: Any = nn.Linear(4, 4, bias=False)
    weight, dropped = module.weight, []
    weight.register_post_accumulate_grad_hook(lambda p: dropped.append(p.grad_added_to_main_grad))
    graphed = Graphed([module], pool="launched")
    recording: Any = SimpleNamespace(parameters={weight: None}, is_tuple=False)
    graphed.recordings["other shapes"] = recording
    x = torch.randn(3, 4, requires_grad=True)
    out = graphed._launched(module, (x,))
    weight.grad_added_to_main_grad = True  # a replayed pass' backward comes in between
    out.sum().backward()
    assert dropped == [False]
    assert torch.equal(weight.grad, x.detach().sum(0).expand(4, 4))
    assert torch.equal(out, module(x))
