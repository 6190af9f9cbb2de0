"""AdamW on the host: the same steps as on the device, and what is said where DeepSpeed cannot be had."""

from __future__ import annotations

import os
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from k3train.__main__ import main
from k3train.config.problems import Unavailable
from k3train.optim.adam import GroupStepAdam
from k3train.optim.offload import HostAdam, host_adam
from tests.ranks import run_ranks
from tests.with_deepspeed import with_deepspeed

SIZES = (1, 15, 16, 1000, 4099)
"""Around the widths at which vector instructions leave a rest."""


def groups(values: list[torch.Tensor]) -> list[dict[str, Any]]:
    shared = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8}
    return [
        {"params": values[:2], "weight_decay": 0.0, **shared},
        {"params": [], "weight_decay": 0.5, **shared},
        {"params": values[2:], "weight_decay": 0.1, **shared},
    ]


def start(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=generator).to(dtype) for size in SIZES]


@with_deepspeed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_hundred_steps_are_those_on_the_device(dtype: torch.dtype) -> None:
    slices = start(dtype)
    host = HostAdam(groups(slices))
    params = [torch.nn.Parameter(value.to(torch.float32, copy=True)) for value in slices]
    device = GroupStepAdam(groups(params))
    generator = torch.Generator().manual_seed(2)
    for step in range(1, 101):
        for each, param in zip(slices, params, strict=True):
            gradient = torch.randn(param.shape, generator=generator) * 10 ** torch.randn(
                (), generator=generator
            )
            each.decoupled_grad = gradient
            param.grad = gradient.clone()
        for optimizer in (host, device):
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * (1 - step / 200)
            optimizer.step()
        for each, param in zip(slices, params, strict=True):
            master = host.masters[each]
            torch.testing.assert_close(master, param.data, rtol=2e-6, atol=2e-6)
            assert torch.equal(each, master.to(dtype))
    for each, param, first in zip(slices, params, start(dtype), strict=True):
        assert (param.data - first.float()).abs().max() > 1e-2, "far more than the tolerance"
        kept, expected = host.state[host.masters[each]], device.state[param]
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(kept[key], expected[key], rtol=2e-6, atol=2e-6)
    assert [group.get("step") for group in host.param_groups] == [100, None, 100]


@with_deepspeed
def test_masters_follow_parameters_that_were_changed() -> None:
    slices = start(torch.bfloat16)
    host = HostAdam(groups(slices))
    slices[3].mul_(2)
    assert not torch.equal(host.masters[slices[3]], slices[3].float())
    host.reload()
    assert torch.equal(host.masters[slices[3]], slices[3].float())


def test_without_the_package_the_command_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("deepspeed", "deepspeed.ops"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["train", "optim.offload=cpu"]) == 3
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("optim.offload=cpu updates with DeepSpeed's CPU Adam, and the package deepspeed")
    assert said.endswith("pip install 'k3train[deepspeed]', or set optim.offload=none")


def refused(rank: int, folder: Path) -> list[str]:
    """What is said without a compiler, without ninja, and behind a build that was killed."""
    from deepspeed.ops.op_builder import CPUAdamBuilder  # pyright: ignore[reportMissingImports]

    CPUAdamBuilder()._loaded_ops.clear()
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    said = []
    tools = folder / "tools"
    sysconfig.get_path = lambda name: str(tools)  # this process ends with the test
    for names in ((), ("c++",)):
        tools.mkdir(exist_ok=True)
        for name in names:
            (tools / name).symlink_to("/bin/false")
        os.environ["PATH"] = str(tools)
        with pytest.raises(Unavailable) as error:
            host_adam()
        said.append(str(error.value))
    lock = folder / CPUAdamBuilder.NAME / "lock"
    lock.touch()
    hours_ago = time.time() - 7200
    os.utime(lock, (hours_ago, hours_ago))
    with pytest.raises(Unavailable) as error:
        host_adam()
    return [*said, str(error.value)]


@with_deepspeed
def test_without_a_compiler_or_behind_a_dead_build_it_says_so(tmp_path: Path) -> None:
    compiler, ninja, lock = run_ranks(1, refused, tmp_path)[0]
    start = "optim.offload=cpu updates with DeepSpeed's CPU Adam (extra: deepspeed), which is compiled here, "
    assert compiler == (
        f"{start}and there is no c++: install it (Debian, Ubuntu: g++), or set optim.offload=none"
    )
    assert ninja == (
        f"{start}and there is no ninja: install it (Debian, Ubuntu: ninja-build), or set optim.offload=none"
    )
    killed = "is left from a build of DeepSpeed's CPU Adam that was killed: delete it"
    assert lock == f"{tmp_path}/cpu_adam/lock {killed}"
