"""The distributed optimizer on real ranks: the same numbers under every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from k3train.config.schema import Optim, Parallel, Precision
from k3train.optim.build import members, set_learning_rate
from tests.optimizer_step import optimizer_step
from tests.parallel.toy import assemble, build_toy, draw, everything, local_tensors, train_toy
from tests.ranks import run_ranks

LAYOUTS = [
    pytest.param(2, Parallel(tp=2), id="tp2"),
    pytest.param(2, Parallel(pp=2), id="pp2"),
    pytest.param(2, Parallel(cp=2), id="cp2"),
    pytest.param(2, Parallel(ep=2), id="ep2"),
    pytest.param(4, Parallel(pp=2, vp=2, ep=2), id="pp2-vp2-ep2"),
]


def three_steps(rank: int, world: int, parallel: Parallel, precision: Precision, optim: Optim) -> Any:
    chunks, optimizer, groups = build_toy(world, parallel, precision, optim)
    set_learning_rate(optimizer, 0.01)
    norms = train_toy(chunks, optimizer, groups, steps=3)
    return {"norms": norms, "parts": everything(chunks, optimizer, groups)}


def whole_tensors(rank: int) -> list[tuple[str, list[torch.Tensor]]]:
    """Each parameter's value and its gradients of three steps, in full."""
    chunks, _, groups = build_toy(1, Parallel(), Precision.fp32)
    return [
        (sharded.key, [draw(sharded, seed) for seed in range(4)])
        for sharded in local_tensors(chunks, groups)
        if isinstance(sharded.data, torch.nn.Parameter)
    ]


def torch_adamw() -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same three steps in plain torch: gradient norms and final parameters."""
    drawn = run_ranks(1, whole_tensors)[0]
    params = [torch.nn.Parameter(values[0].clone()) for _, values in drawn]
    is_matrix = [not key.endswith(("norm_weight", "A_log", "conv_weight")) for key, _ in drawn]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p, m in zip(params, is_matrix, strict=True) if m], "weight_decay": 0.1},
            {"params": [p for p, m in zip(params, is_matrix, strict=True) if not m], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    norms = []
    for step in range(1, 4):
        for p, (_, values) in zip(params, drawn, strict=True):
            p.grad = values[step].clone()
        norms.append(float(torch.nn.utils.clip_grad_norm_(params, 1.0)))
        optimizer.step()
    stacked: dict[str, list[torch.Tensor]] = {}
    for p, (key, _) in zip(params, drawn, strict=True):
        stacked.setdefault(key, []).append(p.detach())  # the experts share one name
    return norms, {k: torch.stack(v) if len(v) > 1 else v[0] for k, v in stacked.items()}


def test_one_rank_is_torch_adamw_with_clipping() -> None:
    result = run_ranks(1, three_steps, 1, Parallel(), Precision.fp32, Optim())
    ours = assemble([each["parts"] for each in result])
    norms, expected = torch_adamw()
    assert result[0]["norms"] == pytest.approx(norms, rel=1e-6)
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize(("world", "parallel"), LAYOUTS)
def test_every_layout_takes_the_same_steps(world: int, parallel: Parallel, precision: Precision) -> None:
    one = run_ranks(1, three_steps, 1, Parallel(), precision, Optim())
    many = run_ranks(world, three_steps, world, parallel, precision, Optim())
    assert all(each["norms"] == pytest.approx(one[0]["norms"], rel=1e-6) for each in many)
    expected, found = (assemble([each["parts"] for each in run]) for run in (one, many))
    for name, value in expected.items():
        if value.dtype is torch.float32:
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_the_norm_is_returned_when_clipping_is_off() -> None:
    (on,) = run_ranks(1, three_steps, 1, Parallel(), Precision.fp32, Optim())
    (off,) = run_ranks(1, three_steps, 1, Parallel(), Precision.fp32, Optim(clip_grad_norm=0.0))
    assert off["norms"] == on["norms"]
    assert all(norm > 1 for norm in off["norms"])
    moments = [{key: value for key, _, _, value in run["parts"] if "exp_avg." in key} for run in (on, off)]
    assert all(moments[1][key].norm() > 2 * moments[0][key].norm() for key in moments[0])


def bad_step(rank: int, value: float) -> Any:
    chunks, optimizer, groups = build_toy(2, Parallel(pp=2), Precision.bf16)
    train_toy(chunks, optimizer, groups, steps=1)
    before = everything(chunks, optimizer, groups)
    for param in chunks[0].parameters():
        param.main_grad.fill_(1.0)
    if rank == 1:
        next(chunks[0].parameters()).main_grad.view(-1)[0] = value
    outcome = optimizer_step(optimizer)
    after = everything(chunks, optimizer, groups)
    same = all(torch.equal(a[3], b[3]) for a, b in zip(before, after, strict=True))
    return (
        outcome.skipped,
        same,
        {g["step"] for m in members(optimizer) for g in m.param_groups if g["params"]},
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing_on_any_rank(value: float) -> None:
    assert run_ranks(2, bad_step, value) == [(True, True, {1})] * 2


def decayed_names(rank: int) -> Any:
    chunks, optimizer, _ = build_toy(1, Parallel(), Precision.bf16)
    counts = {0.0: 0, 0.1: 0}
    for group in optimizer.param_groups:
        counts[group["weight_decay"]] += sum(p.numel() for p in group["params"])
    return counts, {name: p.numel() for name, p in chunks[0].module.named_parameters()}


def test_every_parameter_is_in_exactly_one_group_with_its_decay() -> None:
    counts, sizes = run_ranks(1, decayed_names)[0]
    exempt = sum(n for name, n in sizes.items() if name.endswith(("norm_weight", "A_log", "conv_weight")))
    assert counts == {0.0: exempt, 0.1: sum(sizes.values()) - exempt}
