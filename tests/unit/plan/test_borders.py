"""What crosses the borders between pipeline chunks."""

from __future__ import annotations

import pytest

from k3train.config.schema import AttnRes, Model, Parallel, Precision
from k3train.parallel.layout import make_layout
from k3train.plan.borders import borders, message_sources, num_sources, pipeline_bytes


def banked(block_layers: int, done: int) -> list[int]:
    """Layers at which the prefix so far was banked as a block."""
    return [layer for layer in range(done) if layer % block_layers == 0]


@pytest.mark.parametrize("block_layers", [1, 2, 3, 12])
def test_number_of_sources_follows_the_blocks(block_layers: int) -> None:
    for done in range(94):
        assert num_sources(block_layers, done) == len(banked(block_layers, done)) + 1


def test_kimi_k3_mixes_nine_sources_at_the_end() -> None:
    assert num_sources(12, 93) == 9


@pytest.mark.parametrize(
    ("layers", "degrees"),
    [
        (6, {"pp": 2}),
        (6, {"pp": 4, "pipeline_split": [2, 1, 2, 1]}),
        (6, {"pp": 2, "vp": 3}),
        (6, {"pp": 2, "vp": 2, "pipeline_split": [1, 3, 1, 1]}),
        (8, {"pp": 4, "vp": 2}),
        (93, {"pp": 8, "vp": 3}),
    ],
)
@pytest.mark.parametrize("block_layers", [1, 2, 12])
def test_a_border_carries_exactly_what_the_receiver_has_not_seen(layers, degrees, block_layers) -> None:
    model = Model(num_layers=layers, attn_res=AttnRes(block_layers=block_layers))
    layout = make_layout(model, Parallel(**degrees), degrees["pp"])
    seen: list[set[int]] = [set() for _ in range(layout.pp)]
    done = 0
    for position, (chunk, border) in enumerate(
        zip(layout.pipeline_split, borders(layout, block_layers), strict=False)
    ):
        done += chunk
        blocks = set(banked(block_layers, done))
        seen[position % layout.pp] = blocks  # a rank keeps what it ends a visit with
        receiver = seen[(position + 1) % layout.pp]
        assert receiver <= blocks
        assert border.sent == len(blocks - receiver) + 1
        assert border.sources == len(blocks) + 1


def test_kimi_k3_in_24_chunks_sends_less_than_half_of_all_blocks() -> None:
    model = Model(
        num_layers=93, hidden_size=7168, precision=Precision.bf16, attn_res=AttnRes(block_layers=12)
    )
    layout = make_layout(model, Parallel(pp=8, vp=3), 8)
    assert num_sources(12, sum(layout.pipeline_split[:-1])) == 9
    assert message_sources(layout, 12) == 4
    one = 8192 * 7168 * 2
    sent = pipeline_bytes(model, layout, 8192)
    assert sent["message_bytes"] == 4 * one
    assert sent["carried_bytes"] == [border.sent * one for border in borders(layout, 12)]
    alone = make_layout(model, Parallel(), 1)
    assert pipeline_bytes(model, alone, 8192) == {"split": [93], "message_bytes": 0, "carried_bytes": []}
