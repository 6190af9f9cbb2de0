"""A tokenizer.json as a user names it: the tokenizer in it, or one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from k3train.config.problems import BadInput

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def read_tokenizer(path: Path, named: str) -> Tokenizer:
    """The tokenizer in the file at ``path``.

    Raises BadInput, its message beginning with ``named``, what the user gave, when the file cannot be read or
    holds none.
    """
    from tokenizers import Tokenizer

    fix = "give the tokenizer.json that made the tokens"
    try:
        return Tokenizer.from_buffer(path.read_bytes())
    except OSError as error:
        raise BadInput(f"{named} cannot be read: {error.strerror}; {fix}") from error
    except ValueError as error:
        raise BadInput(f"{named} is no tokenizer: {error}; {fix}") from error
