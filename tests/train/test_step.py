"""One step on one rank: what reaches the moments, and what a closed stage leaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from k3train.backend.start import seed_everything
from k3train.config.schema import Offload, Optim, Optimizer, Parallel, Recompute, Run
from k3train.curriculum.stages import stage_table
from k3train.optim.build import members
from k3train.optim.offload import HostAdam
from k3train.optim.slices import master_slices
from k3train.parallel.groups import stop_groups
from k3train.plan import recompute
from k3train.train.progress import Progress
from k3train.train.schedule import run_micro_batches, zero_gradients
from k3train.train.setup import build_stage, close_stage, gradients, moments, weights
from k3train.train.step import train_step
from tests.ranks import run_ranks
from tests.train.runs import make_run
from tests.with_deepspeed import with_deepspeed


def start(run: Run, device: str = "cpu") -> tuple[Any, Progress, list[Any]]:
    progress, table = Progress(), stage_table(run)
    setup = build_stage(run, table, table[0], progress, torch.device(device))
    return setup, progress, setup.data.step(0, dp_rank=0, dp_size=1)


def moments_of_one_step(rank: int, run: Run) -> float:
    """Largest deviation of a first moment from that of the mean loss' clipped gradient, over its largest."""
    setup, progress, host = start(run)
    zero_gradients(setup)
    loss, tokens, *_ = run_micro_batches(setup, host, backward=True).tolist()
    mean = {name: grad / tokens for name, grad in gradients(setup.chunks)}
    norm = float(torch.stack([grad.norm() for grad in mean.values()]).norm())
    clip = min(1.0, run.optim.clip_grad_norm / norm)
    assert clip < 1
    result = train_step(setup, progress, host, wants_stop=False)
    assert result.loss == pytest.approx(loss / tokens, rel=1e-6)
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    names = {p: name for chunk in setup.chunks for name, p in chunk.module.named_parameters()}
    worst, seen = 0.0, 0
    for member in members(setup.optimizer):
        for param, master in master_slices(member).items():
            state, grad = member.optimizer.state[master], clip * mean[names[param]].flatten()
            expected = grad if "momentum" in state else (1 - run.optim.beta1) * grad
            found = state["momentum" if "momentum" in state else "exp_avg"].flatten()
            worst = max(worst, float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-12)))
            seen += 1
    assert seen == len(names)
    stop_groups()
    return worst


@pytest.mark.parametrize("optimizer", list(Optimizer))
def test_moments_take_the_clipped_gradient_of_the_mean_loss(tmp_path: Path, optimizer: Optimizer) -> None:
    optim = Optim(optimizer=optimizer, clip_grad_norm=0.01)
    (worst,) = run_ranks(1, moments_of_one_step, make_run(tmp_path, optim=optim))
    assert worst < 1e-5


def gradients_of(run: Run, head_tokens: int, device: str = "cpu", **parallel: Any) -> dict[str, torch.Tensor]:
    """Gradients of one step's summed loss, added in products where a product makes them."""
    seed_everything(3)
    recompute.HEAD_TOKENS = head_tokens
    setup, _, host = start(replace(run, parallel=Parallel(**parallel)), device)
    zero_gradients(setup)
    run_micro_batches(setup, host, backward=True)
    found = {name: grad.clone() for name, grad in gradients(setup.chunks)}
    close_stage(setup)
    return found


def far(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """How far a whole gradient is from another, relative to it."""
    off = sum(float((found[name] - grad).square().sum()) for name, grad in expected.items())
    return (off / sum(float(grad.square().sum()) for grad in expected.values())) ** 0.5


def some_heads_at_a_time(rank: int, run: Run) -> list[float]:
    none = gradients_of(run, 2**21)
    full, offload = Recompute.full, {"recompute": Recompute.full, "recompute_offload": True}
    return [
        far(gradients_of(run, 2**21, recompute=full), none),
        far(gradients_of(run, 128, recompute=full), none),
        far(gradients_of(run, 128, **offload), none),
        far(gradients_of(run, 2**21, cuda_graphs=False), none),
    ]


def test_gradients_of_pieces_of_heads_reach_their_places(tmp_path: Path) -> None:
    distances = run_ranks(1, some_heads_at_a_time, make_run(tmp_path))[0]
    assert max(distances) < 1e-5
    assert distances[1] > 0, "pieces were made"
    assert distances[3] == 0, "a layer in parts, for graphs, is the same bits"


def bytes_after_closing(rank: int, run: Run) -> list[int]:
    """Bytes of parameters, gradients, moments, and rooms on the host: of a stage in use, closed, and of the
    next."""
    sizes = []
    for _ in range(2):
        setup, progress, host = start(run)
        train_step(setup, progress, host, wants_stop=False)
        held = [t for _, t in (*weights(setup.chunks), *gradients(setup.chunks), *moments(setup.optimizer))]
        inner = [member.optimizer for member in members(setup.optimizer)]
        rooms = [room for each in inner if isinstance(each, HostAdam) for room in each._rooms]
        kept = [(StorageWeakRef(room.untyped_storage()), room.nbytes) for room in rooms]
        assert all(size > 0 for _, size in kept)
        del rooms
        for close in (lambda: None, lambda setup=setup: close_stage(setup)):
            close()
            waiting = sum(size for room, size in kept if not room.expired())
            sizes.append(sum(t.untyped_storage().nbytes() for t in held) + waiting)
    return sizes


@pytest.mark.parametrize("offload", [Offload.none, pytest.param(Offload.cpu, marks=with_deepspeed)])
def test_a_closed_stage_holds_no_memory(tmp_path: Path, offload: Offload) -> None:
    run = make_run(tmp_path, optim=Optim(offload=offload))
    first, closed, second, closed_again = run_ranks(1, bytes_after_closing, run)[0]
    assert first == second > 0
    assert closed == closed_again == 0
