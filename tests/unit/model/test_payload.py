"""The pipeline payload: its width at every border and the contract that its two ends keep."""

from __future__ import annotations

import pytest
import torch

from k3train.config import schema
from k3train.model.config import make_config
from k3train.model.payload import num_sources, payload_shape, schedule_config
from k3train.parallel.layout import make_layout


def _sources_by_the_rule(block_layers: int, done: int) -> int:
    """Spec 4.2: a layer with l % block_layers == 0 banks the prefix; the new prefix is one more source."""
    bank = sum(1 for layer in range(done) if layer % block_layers == 0)
    return bank + 1


@pytest.mark.parametrize("block_layers", [1, 2, 3, 12])
def test_number_of_sources_follows_the_blocks(block_layers):
    for done in range(94):
        assert num_sources(block_layers, done) == _sources_by_the_rule(block_layers, done)


def test_kimi_k3_mixes_nine_sources_at_the_end():
    assert num_sources(12, 93) == 9


def _shape(num_layers: int, **degrees):
    model = schema.Model(num_layers=num_layers, hidden_size=4, attn_res=schema.AttnRes(block_layers=2))
    parallel = schema.Parallel(**degrees)
    layout = make_layout(model, parallel, degrees.get("pp", 1))
    return payload_shape(make_config(model, parallel, layout), layout), layout


@pytest.mark.parametrize(
    "degrees", [{"pp": 2}, {"pp": 4}, {"pp": 2, "vp": 3}, {"pipeline_split": [1, 5], "pp": 2}]
)
def test_both_ends_of_every_border_agree(degrees):
    shape, layout = _shape(6, **degrees)
    widest = 0
    for border in range(1, len(layout.pipeline_split)):
        done = sum(layout.pipeline_split[:border])
        sources = tuple(torch.randn(3, 1, 4) for _ in range(num_sources(2, done)))
        payload = shape.pack(sources, done)
        assert payload.shape == (3, 1, shape.width * 4)
        assert payload._base is None  # schedules free the storage after sending
        for a, b in zip(shape.unpack(payload, done), sources, strict=True):
            torch.testing.assert_close(a, b)
        widest = max(widest, len(sources))
    assert shape.width == widest


def test_a_payload_of_another_width_is_refused_at_the_border_that_sees_it():
    shape, _ = _shape(6, pp=2)
    with pytest.raises(AssertionError, match="before layer 3; this rank expects 3 sources of 4"):
        shape.unpack(torch.zeros(3, 1, 8), 3)
    with pytest.raises(AssertionError):
        shape.pack((torch.zeros(3, 1, 4),), 3)


def test_gradients_return_to_the_sources():
    shape, _ = _shape(6, pp=2)
    sources = tuple(torch.randn(3, 1, 4, requires_grad=True) for _ in range(3))
    received = shape.unpack(shape.pack(sources, 3), 3)
    sum((i + 1) * r.sum() for i, r in enumerate(received)).backward()
    for i, source in enumerate(sources):
        torch.testing.assert_close(source.grad, torch.full_like(source, i + 1.0))


def test_only_the_schedules_see_the_wide_hidden_size():
    model = schema.Model(num_layers=6, hidden_size=128)
    parallel = schema.Parallel(pp=2)
    layout = make_layout(model, parallel, 2)
    config = make_config(model, parallel, layout)
    wide = schedule_config(config, layout)
    assert (config.hidden_size, wide.hidden_size) == (128, 3 * 128)
    assert wide.k3.hidden_size == 128
