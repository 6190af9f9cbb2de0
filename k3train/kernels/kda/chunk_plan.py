"""Fixed chunks of 64 tokens over a buffer of documents, and which tokens of a chunk may see each other.

Chunks ignore document borders, so that every chunk of every head is one matrix of the same batch; documents
are kept apart by masks. Axes: n chunks, T tokens of a tile, two tiles to a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 32
"""Tokens of a tile: a span over which e^g, bounded by g >= -5, stays inside fp32 when centred (e^+-80)."""
CHUNK = 2 * TILE
"""Tokens of a chunk."""


@dataclass(kw_only=True, slots=True)
class ChunkPlan:
    """Masks of one call, shared by rows and heads. Tokens past the end count as the last document's."""

    num_tokens: int
    num_chunks: int
    pairs: Tensor
    """bool [n, 2, T, T]: column not after row, same document; within each tile."""
    strict: Tensor
    """bool [n, 2, T, T]: the same without the diagonal."""
    below: Tensor
    """bool [n, T, T]: row in the second tile, column in the first, same document."""
    head: Tensor
    """bool [n, 2, T]: the document that came in from the chunk before."""
    tail: Tensor
    """bool [n, 2, T]: the document of the chunk's last token."""
    tile_tail: Tensor
    """bool [n, 2, T]: the document of the tile's last token."""
    whole: Tensor
    """bool [n]: one document fills the chunk and came in from the chunk before."""

    def part(self, start: int, stop: int) -> ChunkPlan:
        """Masks of chunks [start, stop); views."""
        cut = slice(start, stop)
        return ChunkPlan(
            num_tokens=min(self.num_tokens, stop * CHUNK) - start * CHUNK,
            num_chunks=stop - start,
            pairs=self.pairs[cut],
            strict=self.strict[cut],
            below=self.below[cut],
            head=self.head[cut],
            tail=self.tail[cut],
            tile_tail=self.tile_tail[cut],
            whole=self.whole[cut],
        )


def make_plan(
    num_tokens: int, document: Tensor | None, *, continues: bool, device: torch.device
) -> ChunkPlan:
    """Plan of ``num_tokens`` tokens.

    ``document`` [num_tokens] names each token's document, ascending; None means that all are one document.
    ``continues``: the first document goes on from before the buffer, so the entering state acts on it.
    """
    n = -(-num_tokens // CHUNK)
    if document is None:
        doc = torch.zeros(1, CHUNK, dtype=torch.int64, device=device).expand(n, CHUNK)
    else:
        padding = document[-1:].expand(n * CHUNK - num_tokens)
        doc = torch.cat([document, padding]).view(n, CHUNK)
    tiles = doc.unflatten(1, (2, TILE))
    causal = torch.ones(TILE, TILE, dtype=torch.bool, device=device).tril()
    # one document needs the masks of one chunk only; expanding keeps a long buffer's masks small
    few = slice(0, 1) if document is None else slice(None)
    same = tiles[few, :, :, None] == tiles[few, :, None, :]
    below = tiles[few, 1, :, None] == tiles[few, 0, None, :]
    came_from = torch.cat([doc[:1, 0] if continues else doc[:1, 0] - 1, doc[:-1, -1]])
    return ChunkPlan(
        num_tokens=num_tokens,
        num_chunks=n,
        pairs=(same & causal).expand(n, -1, -1, -1),
        strict=(same & causal.tril(-1)).expand(n, -1, -1, -1),
        below=below.expand(n, -1, -1),
        head=tiles == came_from[:, None, None],
        tail=tiles == doc[:, -1, None, None],
        tile_tail=tiles == tiles[:, :, -1:],
        whole=came_from == doc[:, -1],
    )
