"""GroupStepAdam against torch.optim.AdamW."""

from __future__ import annotations

import copy

import torch

from k3train.optim.adam import GroupStepAdam

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
