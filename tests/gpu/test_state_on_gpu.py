"""Optimizer and checkpoint on a GPU, in a process of its own: the test process must not start CUDA."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from pathlib import Path

from k3train.backend.start import end_process, seed_everything, start_backend, start_processes
from k3train.config.schema import Device, Offload, Optim, Parallel, Precision

device = start_backend(Device.cuda)
start_processes(device, timeout_seconds=60)
seed_everything(1)

import torch
from k3train.checkpoint.folder import newest_good
from k3train.checkpoint.load import load_checkpoint
from k3train.checkpoint.save import Save, save_checkpoint
from k3train.optim.build import members
from k3train.optim.slices import master_slices
from tests.parallel.toy import build_toy, everything, train_toy

folder = Path(sys.argv[1])
optim = Optim(offload=Offload[sys.argv[3]])
chunks, optimizer, groups = build_toy(1, Parallel(), Precision[sys.argv[2]], optim)
train_toy(chunks, optimizer, groups, steps=2)
saved = everything(chunks, optimizer, groups)
save_checkpoint(
    Save(
        directory=folder,
        chunks=chunks,
        optimizer=optimizer,
        train_state={"step": 2},
        groups=groups,
        keep=2,
    )
)
draws = torch.rand(3, device=device)
straight = train_toy(chunks, optimizer, groups, steps=2, start=2)
end = everything(chunks, optimizer, groups)
load_checkpoint(newest_good(folder), chunks=chunks, optimizer=optimizer, groups=groups, verified=True)
assert all(torch.equal(a[3], b[3]) for a, b in zip(saved, everything(chunks, optimizer, groups), strict=True))
assert torch.equal(torch.rand(3, device=device), draws)
assert train_toy(chunks, optimizer, groups, steps=2, start=2) == straight
assert all(torch.equal(a[3], b[3]) for a, b in zip(end, everything(chunks, optimizer, groups), strict=True))
assert all(p.is_cuda for p in chunks[0].parameters())
for member in members(optimizer):
    for param, master in master_slices(member).items():
        held = [master, *(v for v in member.optimizer.state[master].values() if torch.is_tensor(v))]
        assert len(held) == 3
        assert {each.is_cuda for each in held} == {optim.offload is Offload.none}
        assert torch.equal(param.flatten().cpu(), master.to(param.dtype).cpu())  # copied back
print("same", flush=True)
end_process(0)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, precision: str, offload: str) -> None:
    if offload == "cpu":
        pytest.importorskip("deepspeed")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), precision, offload],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout.strip().endswith("same"), done.stderr[-4000:]
