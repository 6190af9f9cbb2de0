"""Keeping passwords and keys out of everything that is printed or written.

A secret is what an environment variable with a telling name holds, such as WANDB_API_KEY, what a key with
such a name is set to, and the password in an address. The words must stand alone: ``batch_tokens`` is no
token.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, TextIO, cast

HIDDEN = "***"
"""What stands in the place of a secret."""

_SHORTEST = 8
"""Shorter values of a variable are words such as ``true``, which would be hidden everywhere."""

_WORDS = r"(?:secrets?|passwords?|passwd|credentials?)"
_VARIABLE = re.compile(rf"(?:.*_)?(?:{_WORDS}|(?:api)?keys?|tokens?)(?:_id|_value)?", re.IGNORECASE)
_KEY = rf"(?:[\w.-]*[._-])?(?:{_WORDS}|api_?keys?)|[\w.-]*[._-](?:key|token)"
"""In text, ``key`` and ``token`` alone are words like others."""
_PLACEHOLDER = r"(?-i:VALUE)\.?(?:[\s,;]|$)"
"""In messages such as ``Write model.KEY=VALUE``."""
_ASSIGNED = re.compile(
    rf"""((?<![\w.-])(?:{_KEY})["']?\s*[=:]\s*)(?!{_PLACEHOLDER})(?:"[^"]*"|'[^']*'|[^\s"',;}}\]]+)""",
    re.IGNORECASE,
)
_ADDRESS = re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s:/@]*:)[^\s/@]+@", re.IGNORECASE)


def redact(text: str) -> str:
    """The text with every secret hidden."""
    text = _ADDRESS.sub(rf"\1{HIDDEN}@", redact_values(text))
    return _ASSIGNED.sub(rf"\1{HIDDEN}", text)


def redact_values(text: str) -> str:
    """The text with the secrets of the environment hidden."""
    for value in _values():
        text = text.replace(value, HIDDEN)
    return text


def redact_data(value: Any) -> Any:
    """JSON data with every secret in it hidden."""
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value).items()
        return {key: HIDDEN if _hides(key, entry) else redact_data(entry) for key, entry in entries}
    if isinstance(value, list | tuple):
        return [redact_data(entry) for entry in cast("list[Any]", value)]
    return redact(value) if isinstance(value, str) else value


def _hides(key: object, entry: object) -> bool:
    return isinstance(entry, str) and re.fullmatch(_KEY, str(key), re.IGNORECASE) is not None


def variable_in(text: str) -> str | None:
    """Name of an environment variable whose secret the text holds."""
    return next((name for value, name in _values().items() if value in text), None)


@contextmanager
def redacted_output() -> Generator[None]:
    """Within it, secrets are hidden in all that this process prints: messages, warnings, tracebacks.

    On the standard output only those of the environment: what a model writes after a prompt is no message.
    """
    before = sys.stdout, sys.stderr
    sys.stdout = cast("TextIO", _Redacting(sys.stdout, redact_values))
    sys.stderr = cast("TextIO", _Redacting(sys.stderr, redact))
    try:
        yield
    except Exception:
        raise  # the interpreter prints it, into what stands there now
    except BaseException:
        sys.stdout, sys.stderr = before
        raise
    sys.stdout, sys.stderr = before


class _Redacting:
    """A text stream that hides secrets and is otherwise the one that it wraps."""

    def __init__(self, stream: TextIO, hide: Callable[[str], str]) -> None:
        self._stream, self._hide = stream, hide

    def write(self, text: str) -> int:
        """Write ``text`` without its secrets."""
        self._stream.write(self._hide(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Write ``lines`` without their secrets."""
        self._stream.writelines(self._hide(line) for line in lines)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@cache
def _values_of(environment: tuple[tuple[str, str], ...]) -> dict[str, str]:
    found = {value.strip(): name for name, value in environment}
    return dict(sorted(found.items(), key=lambda entry: -len(entry[0])))


def _values() -> dict[str, str]:
    """Every secret of the environment and its variable, longest first."""
    telling = tuple(
        (name, value)
        for name, value in os.environ.items()
        if len(value.strip()) >= _SHORTEST and _VARIABLE.fullmatch(name)
    )
    return _values_of(telling)
