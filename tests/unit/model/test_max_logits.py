"""Largest logits against a dense masked product."""

from __future__ import annotations

import pytest
import torch

from k3train.kernels import max_logits as module
from k3train.kernels.max_logits import max_logits, max_logits_of_ranges
from k3train.plan.queries import assign_queries

CASES = [(0, 1, 6, 7, 25, 40), (0, 40), (0, 700), (0, 5, 600, 700)]
"""Joined short documents, a lone one, one longer than what is joined, and both."""


@pytest.mark.parametrize("borders", CASES, ids=str)
@pytest.mark.parametrize("block", [2**26, 2**11])
def test_it_is_the_maximum_over_what_each_query_sees(
    borders: tuple[int, ...], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK_ELEMENTS", block)
    generator = torch.Generator().manual_seed(0)
    n, heads, d = borders[-1], 3, 5
    q, k = (torch.randn(n, heads, d, generator=generator) for _ in range(2))
    k[-1] = 1000 * q[0]  # the largest product of all lies in the future
    q[-1] = 0
    document = torch.repeat_interleave(torch.tensor(borders).diff())
    seen = (document[:, None] == document[None, :]).tril()
    logits = torch.einsum("qhd,khd->hqk", q, k) * 0.3
    want = logits.masked_fill(~seen, float("-inf")).amax((1, 2))
    torch.testing.assert_close(max_logits(q, k, borders, 0.3), want)
    assert (want < logits.amax((1, 2))).all()


@pytest.mark.parametrize("borders", CASES, ids=str)
@pytest.mark.parametrize("block", [2**26, 2**11])
def test_shares_of_the_queries_see_what_they_attend_to(
    borders: tuple[int, ...], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK_ELEMENTS", block)
    n, heads, d = borders[-1], 3, 5
    q, k = (torch.randn(n, heads, d, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    k[-1] = 10 * q[0]
    found = []
    for ranges in assign_queries(borders, 3):
        rows = torch.cat([torch.arange(*each) for each in ranges])
        found.append(max_logits_of_ranges(q[rows], k, borders, ranges, 0.3))
    torch.testing.assert_close(torch.stack(found).amax(0), max_logits(q, k, borders, 0.3))
    assert not torch.equal(found[0], found[1])
