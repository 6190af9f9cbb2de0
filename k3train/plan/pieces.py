"""How much kernels and layers take at a time: they work by it, and the estimate of memory counts by it."""

from __future__ import annotations

PIECE_TOKENS = 65536
"""Tokens of a rank beyond which a fully recomputed feed-forward works piece by piece."""
CHUNK_ELEMENTS = 2**28
"""Logits that exist at once on a rank: half a GiB in bf16, and an fp32 copy of them where one is needed."""
KEPT_ELEMENTS = 2**31
"""Logits that are kept for the backward pass where that is asked for: 4 GiB in bf16."""
KDA_CHUNK = 64
"""Tokens of a chunk of KDA's kernels for Hopper."""
