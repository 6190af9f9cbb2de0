"""Kimi Delta Attention and its convolution over context-parallel ranks against one rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from k3train.kernels.kda.choose import kda
from k3train.kernels.kda.context_parallel import scan_maps
from k3train.kernels.packing import Packing, make_packing
from k3train.kernels.short_conv import short_conv
from tests.ranks import run_ranks

BOUND = -5.0
TOKENS = 320
DOCUMENTS = {
    "one document over every rank": (0, TOKENS),
    "over three borders, with short ones at the ends": (0, 1, 5, 310, 318, 319, TOKENS),
    "ends on the borders of ranks": (0, 80, 160, 240, TOKENS),
    "fills ranks and crosses others": (0, 3, 4, 80, 240, 241, 300, TOKENS),
    "one token after, one before a border": (0, 79, 81, 159, 161, 162, 163, TOKENS),
}


def draw(heads: int, dtype: torch.dtype, rows: int = 1) -> list[Tensor]:
    """q, k, v, z, beta, A_log, dt_bias with slow decay, so that states carry over whole shards."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    wide = [normal(rows, TOKENS, heads, 8) for _ in range(4)]
    wide[3] = wide[3] - 9
    inputs = [*wide, normal(rows, TOKENS, heads) - 2, normal(heads) * 0.2, normal(heads * 8) * 0.3]
    return [x.to(dtype) for x in inputs]


def local_packing(borders: tuple[int, ...] | None, rank: int, size: int) -> Packing | None:
    if borders is None:
        return None
    return make_packing(borders, torch.ones(TOKENS, dtype=torch.bool), rank=rank, size=size)


def run_kda(rank: int, inputs: list[Tensor], do: Tensor, borders: tuple[int, ...] | None) -> list[Tensor]:
    """Output and gradients: this rank's tokens, and its part of the sums for A_log and dt_bias."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    mine = [x.chunk(size, 1)[rank] if x.ndim > 2 else x for x in inputs]
    mine = [x.detach().clone().requires_grad_() for x in mine]
    group = dist.group.WORLD if size > 1 else None
    packing = local_packing(borders, rank, size)
    o, _ = kda(*mine, gate_lower_bound=BOUND, packing=packing, cp_group=group)
    return [o.detach(), *torch.autograd.grad((o * do.chunk(size, 1)[rank]).sum(), mine)]


def compare(results: list[list[Tensor]], expected: list[Tensor], tolerance: float) -> None:
    names = ("o", "q", "k", "v", "z", "beta", "A_log", "dt_bias")
    for i, name in enumerate(names):
        parts = [r[i] for r in results]
        got = sum(parts) if name in ("A_log", "dt_bias") else torch.cat(parts, 1)
        error = (got - expected[i]).norm() / expected[i].norm()
        assert error < tolerance, (name, error)


@pytest.mark.parametrize("borders", DOCUMENTS.values(), ids=DOCUMENTS.keys())
@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_equal_one_rank(ranks: int, borders: tuple[int, ...]) -> None:
    """float64: what remains is the order of additions."""
    inputs = draw(4, torch.float64)
    do = torch.randn_like(inputs[2])
    compare(run_ranks(ranks, run_kda, inputs, do, borders), run_kda(0, inputs, do, borders), 1e-10)


@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_equal_one_rank_in_fp32(ranks: int) -> None:
    inputs = draw(4, torch.float32)
    do = torch.randn_like(inputs[2])
    borders = DOCUMENTS["over three borders, with short ones at the ends"]
    compare(run_ranks(ranks, run_kda, inputs, do, borders), run_kda(0, inputs, do, borders), 1e-5)


def test_heads_that_ranks_cannot_share() -> None:
    """Three heads on two ranks, and four ranks of which one has no head: empty maps make shares equal."""
    inputs = draw(3, torch.float64)
    do = torch.randn_like(inputs[2])
    borders = (0, 100, 300, TOKENS)
    for ranks in (2, 4):
        compare(run_ranks(ranks, run_kda, inputs, do, borders), run_kda(0, inputs, do, borders), 1e-10)


def test_rows_without_packing() -> None:
    inputs = draw(2, torch.float64, rows=2)
    do = torch.randn_like(inputs[2])
    compare(run_ranks(2, run_kda, inputs, do, None), run_kda(0, inputs, do, None), 1e-10)


def test_an_early_token_reaches_the_last_rank() -> None:
    """Guards the tests above against states that decay before they could differ."""
    inputs = draw(4, torch.float64)
    before, _ = kda(*inputs, gate_lower_bound=BOUND)
    inputs[2][:, 10] += 1
    after, _ = kda(*inputs, gate_lower_bound=BOUND)
    assert (after - before)[:, 250:].abs().max() > 1e-4


def _refused(rank: int) -> str:
    inputs = draw(2, torch.float64)
    with pytest.raises(ValueError, match="whole documents") as error:
        kda(*inputs, gate_lower_bound=BOUND, cp_group=dist.group.WORLD, output_final_state=True)
    with pytest.raises(ValueError, match=r"lower parallel\.cp"):
        short_conv(torch.zeros(1, 2, 3), torch.zeros(3, 4), None, dist.group.WORLD)
    return str(error.value)


def test_refusals() -> None:
    assert len(run_ranks(2, _refused)) == 2


@pytest.mark.parametrize("backward", [False, True])
def test_scan(backward: bool) -> None:
    maps = torch.randn(5, 2, 3, 3 + 4, dtype=torch.float64)
    states = scan_maps(maps, backward=backward)
    order = [4, 3, 2, 1, 0] if backward else [0, 1, 2, 3, 4]
    state = torch.zeros(2, 3, 4, dtype=torch.float64)
    for r in order:
        torch.testing.assert_close(states[r], state)
        state = maps[r, :, :, 3:] + maps[r, :, :, :3] @ state


def run_conv(
    rank: int, x: Tensor, weight: Tensor, dy: Tensor, borders: tuple[int, ...] | None
) -> list[Tensor]:
    size = dist.get_world_size() if dist.is_initialized() else 1
    mine, taps = x.chunk(size, 1)[rank].clone().requires_grad_(), weight.clone().requires_grad_()
    group = dist.group.WORLD if size > 1 else None
    y = short_conv(mine, taps, local_packing(borders, rank, size), group)
    return [y.detach(), *torch.autograd.grad((y * dy.chunk(size, 1)[rank]).sum(), (mine, taps))]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("borders", [*DOCUMENTS.values(), None])
def test_convolution_equals_one_rank(ranks: int, borders: tuple[int, ...] | None) -> None:
    x, dy = torch.randn(2, 1, TOKENS, 3, dtype=torch.float64)
    weight = torch.randn(3, 4, dtype=torch.float64)
    want = run_conv(0, x, weight, dy, borders)
    results = run_ranks(ranks, run_conv, x, weight, dy, borders)
    torch.testing.assert_close(torch.cat([r[0] for r in results], 1), want[0])
    torch.testing.assert_close(torch.cat([r[1] for r in results], 1), want[1])
    torch.testing.assert_close(torch.stack([r[2] for r in results]).sum(0), want[2])
