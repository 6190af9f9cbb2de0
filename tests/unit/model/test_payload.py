"""The pipeline payload: the contract that the two ends of a border keep, and the way back of gradients."""

from __future__ import annotations

import pytest
import torch

from k3train.config import schema
from k3train.model.config import make_config
from k3train.model.payload import BlockCache, Kept, Payload, make_payload, schedule_config
from k3train.parallel.layout import make_layout

HIDDEN = 4


def payloads(num_layers: int, **degrees) -> tuple[list[Payload], int]:
    model = schema.Model(num_layers=num_layers, hidden_size=HIDDEN, attn_res=schema.AttnRes(block_layers=2))
    parallel = schema.Parallel(**degrees)
    layout = make_layout(model, parallel, degrees.get("pp", 1))
    config = make_config(model, parallel, layout)
    return [make_payload(config, layout, i) for i in range(len(layout.pipeline_split))], layout.pp


def new_blocks(payload: Payload) -> int:
    """Blocks that the chunk finishes itself."""
    assert payload.after is not None
    return payload.after.sources - (payload.before.sources if payload.before else 1)


@pytest.mark.parametrize(
    ("layers", "degrees"),
    [
        (6, {"pp": 2}),
        (6, {"pp": 4, "pipeline_split": [2, 1, 2, 1]}),
        (6, {"pp": 2, "vp": 3}),
        (8, {"pp": 4, "vp": 2}),
    ],
)
def test_sources_and_their_gradients_cross_every_border_once(layers, degrees) -> None:
    """Each chunk reads every source with a weight of its own and adds blocks; compare with one graph."""
    chain, pp = payloads(layers, **degrees)
    vp = len(chain) // pp
    caches = [BlockCache(vp) for _ in range(pp)]
    start = torch.randn(3, 1, HIDDEN, requires_grad=True)

    def run(sources: tuple, position: int) -> tuple:
        mixed = sum(torch.tanh((i + 2.0) * (position + 1.0) * source) for i, source in enumerate(sources))
        return (*sources, *(mixed * (k + 1) for k in range(new_blocks(chain[position]))))

    whole = (start,)
    for position in range(len(chain) - 1):
        whole = run(whole, position)
    (want,) = torch.autograd.grad(sum((source**2).sum() for source in whole), start)

    received, sent = [], []
    sources: tuple = (start,)
    for position, payload in enumerate(chain):
        cache, chunk = caches[position % pp], position // pp
        kept = cache.take(chunk)
        if position > 0:
            received.append(sent[-1].detach().requires_grad_())
            sources = payload.unpack(received[-1], kept)
        if position < len(chain) - 1:
            sent.append(payload.pack(run(sources, position), kept))
            cache.leave(chunk, kept)
            assert sent[-1].shape == (3, 1, payload.width * HIDDEN)
            assert sent[-1]._base is None  # schedules free the storage after sending
    loss = sum((source**2).sum() for source in sources)
    for source, other in zip(sources, whole, strict=True):
        torch.testing.assert_close(source, other)
    loss.backward()
    for message, source in zip(reversed(sent), reversed(received), strict=True):
        message.backward(source.grad)
    torch.testing.assert_close(start.grad, want)
    assert not any(queue for cache in caches for queue in cache._waiting)


def test_a_payload_of_another_width_is_refused() -> None:
    (first, second), _ = payloads(6, pp=2)
    with pytest.raises(AssertionError, match="this rank expects 3 sources of 4"):
        second.unpack(torch.zeros(3, 1, 8), Kept())
    with pytest.raises(AssertionError):
        first.pack((torch.zeros(3, 1, 4),), Kept())


def test_a_visit_without_the_blocks_of_the_visit_before_is_refused() -> None:
    chain, _ = payloads(6, pp=2, vp=3)
    with pytest.raises(AssertionError, match="known=1"):
        chain[2].unpack(torch.zeros(3, 1, chain[2].width * HIDDEN), Kept())


def test_only_the_schedules_see_the_wide_hidden_size() -> None:
    model = schema.Model(num_layers=6, hidden_size=128)
    parallel = schema.Parallel(pp=2)
    layout = make_layout(model, parallel, 2)
    config = make_config(model, parallel, layout)
    wide = schedule_config(config, layout)
    assert (config.hidden_size, wide.hidden_size) == (128, 3 * 128)
    assert wide.k3.hidden_size == 128
