"""Replayed graphs compute what the function computes, on a GPU."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from k3train.kernels.graphed import Graphed
from k3train.kernels.rms_norm import rms_norm
from k3train.model.layer import REPLAYS_ATTENTION
from k3train.model.parameters import Linear

pytestmark = pytest.mark.gpu


class Part(nn.Module):
    """A norm, whose weight has an ordinary gradient, and a linear, whose gradient is added to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.rand(256, device="cuda"))
        self.linear = Linear(256, 256, bias=False, dtype=torch.bfloat16, device="cuda")
        nn.init.normal_(self.linear.weight, std=1 / 16)
        self.linear.weight.main_grad = torch.zeros(256, 256, device="cuda")  # type: ignore[attr-defined]
        self.seen = torch.zeros((), device="cuda")

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        """x bf16 [n, 256], valid bool [n], counted on the way."""
        self.seen += valid.sum()
        return x + self.linear(rms_norm(x, self.norm, 1e-5))


def test_passes_equal_those_without_graphs() -> None:
    torch.manual_seed(0)
    part = Part()
    graphed = Graphed([part], pool="part")
    fed = partial(graphed, part)
    passes = [
        (torch.randn(64, 256, device="cuda").bfloat16(), torch.rand(64, device="cuda") < 0.5)
        for _ in range(4)
    ]

    def run(function: object, together: bool) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        part.linear.weight.main_grad.zero_()  # type: ignore[attr-defined]
        part.seen.zero_()
        part.norm.grad = None
        outs, leaves = [], []
        for x, valid in passes:
            leaves.append(x.clone().requires_grad_())
            outs.append(function(leaves[-1] * 1, valid))  # type: ignore[operator]
            if not together:
                outs[-1].backward(2 * x)
                outs[-1] = outs[-1].detach().clone()
        for out, (x, _) in zip(outs, passes, strict=True):
            if together:
                out.backward(2 * x)
        values = [out.detach().clone() for out in outs] + [leaf.grad for leaf in leaves]
        assert part.norm.grad is not None
        return values, part.norm.grad.clone(), part.linear.weight.main_grad.clone(), part.seen.clone()  # type: ignore[attr-defined]

    want = run(part, together=False)
    for together in (False, True):  # all forward passes before the first backward pass: one is replayed
        got = run(fed, together)
        assert all(torch.equal(a, b) for a, b in zip(got[0], want[0], strict=True))
        for a, b in zip(got[1:], want[1:], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert [r is not None for r in graphed.recordings.values()] == [True]


def test_parts_recorded_out_of_order_keep_their_values() -> None:
    """The second part of a chain is recorded before the first, as when shapes change between passes."""
    torch.manual_seed(0)
    parts: list[Any] = [Part(), Part()]
    graphed = [Graphed([part], pool="chain") for part in parts]
    valid = torch.ones(64, dtype=torch.bool, device="cuda")

    def run(functions: list[Any]) -> list[Tensor]:
        for part in parts:
            part.linear.weight.main_grad.zero_()
            part.norm.grad = None
        leaf = x.clone().requires_grad_()
        y = leaf * 1
        for function in functions:
            y = function(y, valid)
        y.backward(x)
        found = [y.detach(), leaf.grad, *(p.norm.grad for p in parts)]
        return [t.clone() for t in (*found, *(p.linear.weight.main_grad for p in parts)) if t is not None]

    replayed = [partial(g, part) for g, part in zip(graphed, parts, strict=True)]
    for chain in [replayed[1:]] * 2 + [replayed] * 4:
        x = torch.randn(64, 256, device="cuda").bfloat16()
        want = run(parts[len(parts) - len(chain) :])
        for a, b in zip(run(chain), want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert all(any(g.recordings.values()) for g in graphed)


PROGRAM = """
import faulthandler
import sys
from dataclasses import replace
from pathlib import Path

from k3train.backend.start import end_process, seed_everything, start_backend, start_processes
from k3train.config.schema import Curriculum, Device, Kda, Mla, Parallel, Precision, Stage

faulthandler.dump_traceback_later(90, exit=True)  # where it hangs or what it compiles
device = start_backend(Device.cuda)
start_processes(device, timeout_seconds=60)

from k3train.kernels.graphed import Graphed
from k3train.train.schedule import run_micro_batches, zero_gradients
from k3train.train.setup import close_stage, gradients
from tests.train.runs import make_run, small_model
from tests.train.test_step import far, start

model = replace(
    small_model(), num_layers=3, num_heads=4, hidden_size=256, precision=Precision.bf16,
    kda=Kda(head_dim=128, decay_rank=32),
    mla=Mla(q_lora_rank=64, kv_lora_rank=64, qk_head_dim=128, qk_shared_head_dim=64, v_head_dim=128),
)
only = Stage(context_tokens=2048, tokens=16384, batch_tokens=4096)
curriculum = Curriculum(stages={"only": only}, order=["only"], eval_tokens=128)
run = make_run(Path(sys.argv[1]), model=model, device=Device.cuda, curriculum=curriculum)


def steps(graphs):
    seed_everything(3)
    setup, _, _ = start(replace(run, parallel=Parallel(cuda_graphs=graphs)), "cuda")
    found = []
    for i in range(3):
        zero_gradients(setup)
        run_micro_batches(setup, setup.data.step(i, dp_rank=0, dp_size=1), backward=True)
        setup.routers.discard()
        found.append({name: grad.clone() for name, grad in gradients(setup.chunks)})
    parts = [x for chunk in setup.chunks for m in chunk.modules() for x in vars(m).values()]
    recorded = sum(any(x.recordings.values()) for x in parts if isinstance(x, Graphed))
    close_stage(setup)
    return found, recorded


plain, replayed = steps(False), steps(True)
print(plain[1], replayed[1], *(far(a, b) for a, b in zip(replayed[0], plain[0])), flush=True)
end_process(0)
"""


def test_gradients_of_a_whole_model(tmp_path: Path) -> None:
    """Three steps of two micro-batches with documents of their own each, replayed and not."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    numbers = [float(x) for x in done.stdout.split()[-5:]]
    assert len(numbers) == 5, done.stderr[-4000:]
    print(numbers)
    assert numbers[:2] == [0, 6 if REPLAYS_ATTENTION else 3], "two graphs of each of three layers"
    # attention sums up in no fixed order, so that two equal passes differ too
    assert max(numbers[2:]) < 1e-2
