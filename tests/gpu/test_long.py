"""Gradients of a whole model under what long sequences need, in a process of its own: it starts CUDA."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from pathlib import Path

from k3train.backend.start import end_process, start_backend, start_processes
from k3train.config.schema import Curriculum, Device, Kda, Mla, Precision, Recompute, Stage

device = start_backend(Device.cuda)
start_processes(device, timeout_seconds=60)

from dataclasses import replace

import torch
from tests.train.runs import make_run, small_model
from tests.train.test_step import far, gradients_of

model = replace(
    small_model(), num_heads=4, hidden_size=256, precision=Precision.bf16,
    kda=Kda(head_dim=128, decay_rank=32),
    mla=Mla(q_lora_rank=64, kv_lora_rank=64, qk_head_dim=128, qk_shared_head_dim=64, v_head_dim=128),
)
only = Stage(context_tokens=2048, tokens=4096, batch_tokens=2048)
curriculum = Curriculum(stages={"only": only}, order=["only"], eval_tokens=128)
run = make_run(Path(sys.argv[1]), model=model, device=Device.cuda, curriculum=curriculum)
full = {"recompute": Recompute.full}
none = gradients_of(run, 2**21, "cuda", cuda_graphs=False)
print(
    far(gradients_of(run, 2**21, "cuda", **full), none),
    far(gradients_of(run, 2048, "cuda", **full), none),
    far(gradients_of(run, 2048, "cuda", **full, recompute_offload=True), none),
)
torch.cuda.synchronize()
pinned = torch.cuda.host_memory_stats()
print(pinned["allocated_bytes.peak"], pinned["allocated_bytes.current"], flush=True)
end_process(0)
"""


@pytest.mark.gpu
def test_gradients_are_those_of_a_model_that_keeps_everything(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    numbers = [float(x) for x in done.stdout.split()[-5:]]
    assert len(numbers) == 5, done.stderr[-4000:]
    print(numbers)
    *distances, peak, after = numbers
    # bf16 rounds to 2^-9; partial sums over heads are rounded too
    assert max(distances) < 2e-2, distances
    # what layers kept on the host is given back with the stage
    assert peak >= 2 * 2048 * 256 > after
