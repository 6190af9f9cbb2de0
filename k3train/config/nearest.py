"""Nearest valid numbers, for the fix of a problem."""

from __future__ import annotations

from collections.abc import Sequence


def divisors(number: int, near: int, count: int = 2) -> list[int]:
    """The ``count`` divisors of ``number`` that lie nearest to ``near``, ascending."""
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    found = sorted({*low, *(number // d for d in low)}, key=lambda d: (abs(d - near), d))
    return sorted(found[:count])


def multiples(number: int, of: int) -> list[int]:
    """The positive multiples of ``of`` just below and just above ``number``."""
    below = number // of * of
    return [value for value in (below, below + of) if value > 0]


def choices(values: Sequence[object]) -> str:
    """``a``, ``a or b``, ``a, b or c``."""
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]
