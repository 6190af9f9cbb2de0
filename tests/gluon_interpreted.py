"""Gluon for Triton's interpreter: layouts mean nothing, and a copy comes when it is waited for, not before.

For a process with TRITON_INTERPRET=1. A kernel that reads a slot before its copy has come, or while one is
under way, fails.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import triton
import triton.language as tl


class _Slot:
    def __init__(self) -> None:
        self.content = None

    def load(self, layout):
        assert self.content is not None, "a slot is read before its copy has come"
        return self.content


class _Slots:
    def __init__(self, shape: list[int]) -> None:
        self.slots = [_Slot() for _ in range(shape[0])]

    def index(self, i: int) -> _Slot:
        return self.slots[i]


class _Copies:
    """Groups of copies under way, the oldest first; programs run one after another."""

    def __init__(self) -> None:
        self.open, self.groups = [], []

    def async_copy_global_to_shared(self, slot: _Slot, pointers, mask) -> None:
        slot.content = None
        self.open.append((slot, tl.load(pointers, mask=mask, other=0.0)))

    def commit_group(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait_group(self, left: int) -> None:
        while len(self.groups) > left:
            for slot, content in self.groups.pop(0):
                slot.content = content


class _Language(ModuleType):
    constexpr = tl.constexpr

    def __getattr__(self, name: str):
        return getattr(tl, name)

    @staticmethod
    def arange(start, end, layout):
        return tl.arange(start, end)

    @staticmethod
    def zeros(shape, dtype, layout):
        return tl.zeros(shape, dtype)

    @staticmethod
    def allocate_shared_memory(dtype, shape, layout) -> _Slots:
        return _Slots(shape)

    @staticmethod
    def num_warps() -> int:
        return 1

    BlockedLayout = SwizzledSharedLayout = staticmethod(lambda *of: None)


def _jit(function):
    function.__globals__["tl"] = tl  # the interpreter looks for it
    interpreted = triton.jit(function)
    # and knows constants by "tl.constexpr", not by "gl.constexpr"
    interpreted.rewrite().__annotations__ = function.__annotations__
    return interpreted


@contextmanager
def in_place() -> Iterator[None]:
    """Modules imported within have this for Gluon; the interpreter itself asks for the real one later."""
    name = "triton.experimental.gluon"
    gluon = SimpleNamespace(jit=_jit, language=_Language(f"{name}.language"))
    with patch.dict(sys.modules):
        sys.modules["triton.experimental"] = SimpleNamespace(gluon=gluon)
        sys.modules[name] = gluon
        sys.modules[f"{name}.language.nvidia.ampere"] = SimpleNamespace(async_copy=_Copies())
        yield
        imported = {each: module for each, module in sys.modules.items() if each.startswith("k3train.")}
    sys.modules |= imported
