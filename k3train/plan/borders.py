"""What crosses each border between pipeline chunks, and what it weighs. No torch.

A pipeline rank visits a micro-batch once for each of its chunks and keeps the blocks of attention residuals
that it has met. Before its first visit it lacks every block; before a later one, those that were finished
since its previous visit. megatron-core's schedules send one tensor of one shape over every border.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3train.config.schema import Model, Precision
from k3train.parallel.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Border:
    """What crosses from one chunk to the next in pipeline order."""

    sources: int
    """Finished blocks (the embedding among them) and the running prefix at this border."""
    known: int
    """Leading blocks that the receiver keeps from its previous visit."""

    @property
    def sent(self) -> int:
        """Sources that travel: the blocks that the receiver lacks and the running prefix."""
        return self.sources - self.known


def num_sources(block_layers: int, done: int) -> int:
    """Finished blocks (the embedding among them) and the running prefix after ``done`` decoder layers."""
    return -(-done // block_layers) + 1


def borders(layout: Layout, block_layers: int) -> list[Border]:
    """Every border of a layout in pipeline order; border i lies after the chunk at position i."""
    ends = [sum(layout.pipeline_split[: i + 1]) for i in range(len(layout.pipeline_split))]
    sources = [num_sources(block_layers, done) for done in ends]
    # The receiver's previous visit was pp positions earlier; it keeps the blocks that chunk ended with.
    return [
        Border(sources=sources[i], known=sources[i + 1 - layout.pp] - 1 if i + 1 >= layout.pp else 0)
        for i in range(len(sources) - 1)
    ]


def message_sources(layout: Layout, block_layers: int) -> int:
    """Sources in one message, padding included: the most that any border carries; 1 without a border."""
    return max((border.sent for border in borders(layout, block_layers)), default=1)


def source_bytes(model: Model, layout: Layout, buffer_tokens: int) -> int:
    """Bytes of one source of a micro-batch of ``buffer_tokens`` tokens, as one rank holds it."""
    tokens = buffer_tokens // (layout.cp * layout.tp)
    return tokens * model.hidden_size * (2 if model.precision is Precision.bf16 else 4)


def pipeline_bytes(model: Model, layout: Layout, buffer_tokens: int) -> dict[str, object]:
    """What one rank sends for one micro-batch over each border, forward and once more backward.

    ``message_bytes`` travel over every border, ``carried_bytes`` of them, in pipeline order, are not padding.
    """
    size = source_bytes(model, layout, buffer_tokens)
    crossed = borders(layout, model.attn_res.block_layers)
    return {
        "split": list(layout.pipeline_split),
        "message_bytes": message_sources(layout, model.attn_res.block_layers) * size if crossed else 0,
        "carried_bytes": [border.sent * size for border in crossed],
    }
