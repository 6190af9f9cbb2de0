"""AdamW's kernel against torch's own."""

from __future__ import annotations

import pytest
import torch

from k3train.optim.adam import GroupStepAdam

SIZES = (1, 33, 4096, 32767, 32768, 100_001)


@pytest.mark.gpu
@pytest.mark.parametrize("shift", [0, 1])
def test_three_steps_are_those_of_torch(shift: int) -> None:
    """Tensors that begin ``shift`` numbers behind a 16-byte boundary; half of them with a bf16 copy."""
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    ours = [torch.randn(n + shift, device="cuda")[shift:] for n in SIZES]
    theirs = [p.clone() for p in ours]
    copies = {p: torch.zeros(p.numel(), dtype=torch.bfloat16, device="cuda") for p in ours[::2]}
    one, two = GroupStepAdam(ours, **settings), torch.optim.AdamW(theirs, fused=True, **settings)
    one.copies, one.factor = copies, 0.3
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.numel() + shift, device="cuda")[shift:]
            b.grad = a.grad * 0.3
        one.step()
        two.step()
    assert len(one._tables) == 2
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(one.state[a][key], two.state[b][key], rtol=1e-5, atol=1e-7)
    for p, copy in copies.items():
        assert torch.equal(copy, p.to(torch.bfloat16))
