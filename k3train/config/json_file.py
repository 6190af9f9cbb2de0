"""Reading JSON that a crash, a disk or an editor may have damaged: its data, or one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from k3train.config.problems import BadInput


def read_json(path: Path, kind: type[BadInput], fix: str) -> Any:
    """The data in a file of JSON.

    Raises ``kind`` with the file, what is wrong and ``fix`` when it cannot be read or is none, and
    FileNotFoundError when it is missing: what that means its reader knows.
    """
    try:
        return parse_json(path.read_bytes())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise kind(f"{path} cannot be read: {error.strerror}; {fix}") from error
    except ValueError as error:
        raise kind(f"{path} cannot be read as JSON: {error}; {fix}") from error


def parse_json(text: str | bytes) -> Any:
    """The data of a text of JSON. Raises ValueError, and nothing else, for any other text."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
