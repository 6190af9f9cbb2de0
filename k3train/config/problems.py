"""What the user is told when a setting is wrong: every problem at once, each with its fix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One setting that cannot stay as it is."""

    key: str
    """Full key path, as typed on the command line; empty when no single key is at fault."""
    value: object
    """What was given."""
    rule: str
    """What must hold, as the end of a sentence that begins with the key."""
    fix: str
    """What to do, as a sentence without its full stop."""
    id: str
    """Stable name of the rule, such as ``parallel.heads-tp``."""
    also: tuple[str, ...] = ()
    """Other keys that the rule read; when one of them is itself wrong, this problem is not reported."""

    def __str__(self) -> str:
        """One line: key, value, rule, fix and the rule's id."""
        start = f"{self.key} = {shown(self.value)} " if self.key else ""
        stop = "" if self.fix.endswith("?") else "."
        return f"{start}{self.rule}. {self.fix}{stop} [{self.id}]"


class BadInput(Exception):
    """What the user gave cannot be used; the message says which part and what to do. Exit code 2."""


class Unavailable(Exception):
    """Something that this machine lacks; the message says what and what to do. Exit code 3."""


class Stopped(Exception):
    """Work cannot go on for a reason that is no fault of the program; the message says why."""

    exit_code = 1


class ConfigError(BadInput):
    """Settings that cannot be used; ``problems`` holds all that were found. ``where`` names the file
    that holds them, if one does."""

    def __init__(self, problems: Iterable[ConfigProblem], where: str = "the configuration") -> None:
        self.problems: list[ConfigProblem] = list(problems)
        self._where = where
        super().__init__(str(self))

    def __str__(self) -> str:
        """All problems, one a line, under a line with their number."""
        count = len(self.problems)
        lines = [f"{count} problem{'s' if count != 1 else ''} in {self._where}:"]
        return "\n".join([*lines, *(f"  {problem}" for problem in self.problems)])


REFUSALS = (BadInput, Unavailable, OSError)
"""What ends a program with a sentence."""


def refusal(error: BadInput | Unavailable | OSError) -> tuple[str, int]:
    """The sentence for the user and the exit code: 2 for what was given, 3 for what this machine lacks."""
    if isinstance(error, OSError):
        sentence = f"{error.filename or 'the output cannot be written'}: {error.strerror}"
        return sentence, 2 if isinstance(error, FileNotFoundError) else 3
    return str(error), 3 if isinstance(error, Unavailable) else 2


def shown(value: object, limit: int = 80) -> str:
    """Value as the user would type it, on one line and cut at ``limit`` characters."""
    text = _spelled(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _spelled(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(_spelled(entry) for entry in cast('list[object]', value))}]"
    if isinstance(value, Mapping):
        entries = cast("Mapping[object, object]", value).items()
        return f"{{{', '.join(f'{_spelled(name)}: {_spelled(entry)}' for name, entry in entries)}}}"
    if isinstance(value, str) and value.isprintable() and value.strip():
        return value
    return repr(value)
