"""A byte-level BPE tokenizer, trained on the corpus it will read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from texts import Text, capped
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = {
    "pad": "<|pad|>",
    "bos": "<|bos|>",
    "eod": "<|eod|>",
    "media_begin": "<|media_begin|>",
    "media_content": "<|media_content|>",
    "media_pad": "<|media_pad|>",
    "media_end": "<|media_end|>",
}
"""Special tokens; their ids are 0, 1, 2, … in this order. The media tokens keep room for images."""


def train(texts: list[Text], *, vocab_size: int, sample_bytes: int) -> Tokenizer:
    """A tokenizer of exactly vocab_size ids, trained on a sample of the texts chosen by hash.

    The result does not depend on the number of threads.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((t.text for t in capped(texts, sample_bytes)), trainer)
    return tokenizer


def encode(path: Path, texts: list[Text]) -> list[np.ndarray]:
    """Tokens of each text between <|bos|> and <|eod|>, by the tokenizer.json at ``path``.

    Text that spells a special token is encoded as ordinary characters: no text can forge a document's end.
    """
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True
    bos, eod = (list(SPECIAL).index(name) for name in ("bos", "eod"))
    encoded = tokenizer.encode_batch_fast([t.text for t in texts], add_special_tokens=False)
    return [np.array([bos, *e.ids, eod], np.int32) for e in encoded]
