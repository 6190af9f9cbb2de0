"""The program that compares two GPUs with one, at its small sizes on CPU ranks."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.gpu.run_parallel import LAYOUTS, MICROS, settings


@pytest.mark.parametrize("small", [False, True])
def test_its_sizes_are_a_model_that_every_layout_can_hold(small: bool) -> None:
    model, tokens, long, steps = settings(small)
    assert tokens < long
    assert steps * MICROS > 1
    for parallel in LAYOUTS.values():
        assert model.num_heads % parallel.tp == 0
        assert model.moe.num_experts % parallel.ep == 0
        assert tokens % parallel.cp == 0


@pytest.mark.slow
def test_two_ranks_give_the_losses_of_one() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [*command, "-m", "tests.gpu.run_parallel", "--small"], capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-2000:]
    table = done.stdout.split("s/step\n")[-1]
    for name in LAYOUTS:
        row = re.search(rf"^{re.escape(name)} +[\d.]+ +[\d.]+ +(\S+)", table, re.MULTILINE)
        assert row is not None, table
        assert float(row[1]) < 1e-3
