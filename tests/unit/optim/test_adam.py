"""GroupStepAdam against torch.optim.AdamW."""

from __future__ import annotations

import copy

import pytest
import torch

from k3train.optim.adam import GroupStepAdam, set_factor
from tests.interpreted import interpret, needs_triton

SETTINGS = {"lr": 3e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def make_params() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 3), (7,), (1,), (2, 2, 2)]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_gradients(params: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator) * 10 ** torch.randn((), generator=generator)


def test_it_is_adamw_step_by_step() -> None:
    ours, theirs = make_params(), make_params()
    one, two = GroupStepAdam(ours, **SETTINGS), torch.optim.AdamW(theirs, fused=True, **SETTINGS)
    for step in range(1, 30):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        one.step()
        two.step()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), step


def test_it_is_adamw_in_plain_formulas() -> None:
    (p,) = params = [torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float32))]
    optimizer = GroupStepAdam(params, **SETTINGS)
    x, m, v = p.detach().double(), torch.zeros(2).double(), torch.zeros(2).double()
    for t in range(1, 6):
        grad = torch.tensor([0.3 * t, -0.1])
        p.grad = grad
        optimizer.step()
        x = x * (1 - 3e-2 * 0.1)
        m, v = 0.9 * m + 0.1 * grad, 0.95 * v + 0.05 * grad**2
        x = x - 3e-2 * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
        torch.testing.assert_close(p.detach().double(), x, rtol=1e-6, atol=1e-7)


def test_a_save_and_load_between_steps_changes_nothing() -> None:
    straight, resumed = make_params(), make_params()
    one, two = GroupStepAdam(straight, **SETTINGS), GroupStepAdam(resumed, **SETTINGS)
    for step in range(1, 9):
        set_gradients(straight, step)
        set_gradients(resumed, step)
        one.step()
        two.step()
        state = copy.deepcopy(two.state_dict())
        two = GroupStepAdam(resumed, lr=1.0)
        two.load_state_dict(state)
        assert two.param_groups[0]["step"] == step
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))


def test_a_parameter_without_gradient_rests() -> None:
    params = make_params()
    optimizer = GroupStepAdam(params, **SETTINGS)
    before = params[0].detach().clone()
    set_gradients(params, 1)
    params[0].grad = None
    optimizer.step()
    assert torch.equal(params[0], before)
    assert params[0] not in optimizer.state


@pytest.mark.parametrize("kind", ["ours", "any"])
def test_a_factor_scales_what_a_step_reads(kind: str) -> None:
    ours, theirs = make_params(), make_params()
    one = GroupStepAdam(ours, **SETTINGS) if kind == "ours" else torch.optim.AdamW(ours, **SETTINGS)
    two = torch.optim.AdamW(theirs, **SETTINGS)
    for step in range(1, 9):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        for p in theirs:
            assert p.grad is not None
            p.grad *= 0.37 / step
        set_factor(one, 0.37 / step)
        one.step()
        two.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


KERNEL = """
import torch
from k3train.optim import triton_adam
triton_adam._CHUNK, triton_adam._BLOCK = 64, 32
torch.manual_seed(0)
params, grads, means, squares = ([torch.randn(n) for n in (1, 63, 64, 65, 200)] for _ in range(4))
squares = [x.abs() for x in squares]
copies = [torch.zeros(len(p), dtype=torch.bfloat16) for p in params]
want = [[x.clone() for x in kind] for kind in (params, means, squares)]
rates = triton_adam.Rates(
    factor=0.3, rate=1e-2 / (1 - 0.9**3), decay=1 - 1e-2 * 0.1, beta1=0.9, beta2=0.95,
    root=(1 - 0.95**3) ** -0.5, eps=1e-8,
)
triton_adam.Table(params, grads, means, squares, copies).step(rates)
torch._fused_adamw_(
    want[0], [g * 0.3 for g in grads], *want[1:], [], [torch.tensor(3.0)] * 5,
    lr=1e-2, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
)
for got, expected in zip((params, means, squares), want, strict=True):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
for copy, p in zip(copies, params, strict=True):
    # the interpreter cuts to bf16 where a GPU rounds
    torch.testing.assert_close(copy.float(), p, rtol=2**-7, atol=0)
from k3train.optim.adam import GroupStepAdam

settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
theirs = [p.clone() for p in params]
ours, other = GroupStepAdam(params, **settings), torch.optim.AdamW(theirs, **settings)
ours.factor = 0.3
for p in params:
    ours.state[p].update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
for step in range(1, 4):
    for p, q in zip(params, theirs, strict=True):
        p.grad = torch.randn_like(p)  # elsewhere in each step
        q.grad = 0.3 * p.grad
    ours.param_groups[0]["step"] = step
    ours._update_on_gpu(ours.param_groups[0], params)
    other.step()
    assert len(ours._tables) == 1
for a, b in zip(params, theirs, strict=True):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
print("same")
"""


@needs_triton
def test_the_kernel_takes_the_same_step() -> None:
    done = interpret(KERNEL)
    assert done.stdout.strip() == "same", done.stderr[-3000:]
