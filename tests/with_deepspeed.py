"""A mark for tests that need DeepSpeed, which the environment of the tests leaves out."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

with_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra deepspeed")
