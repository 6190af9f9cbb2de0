"""Dropping what is cheap to make again: same numbers, less kept, each value made again once."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from k3train.kernels import recompute
from k3train.kernels.beside import beside
from k3train.kernels.main_grad import part_of
from k3train.kernels.recompute import again, make_again, sum_again

WEIGHT = torch.nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))


class Kept(TorchDispatchMode):
    """Counts the bytes of storages made inside and still alive.

    A weak reference keeps a storage's identity from being given to another one; its memory's address may
    come back, for a tensor that is to be counted after one that is not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[StorageWeakRef, int] = {}
        self.outside: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.outside |= {StorageWeakRef(s) for s in _storages((args, kwargs))} - self.made.keys()
        for storage in _storages(out):
            if (ref := StorageWeakRef(storage)) not in self.outside:
                self.made[ref] = storage.nbytes()
        return out

    def bytes(self) -> int:
        """Bytes alive now."""
        gc.collect()
        return sum(size for ref, size in self.made.items() if not ref.expired())


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [x.untyped_storage() for x in tree_leaves(tree) if isinstance(x, Tensor)]


def network(x: Tensor, calls: list[str], on: bool) -> Tensor:
    """Two nested uses: what the inner one takes is a view of what the outer one makes."""

    def outer(x: Tensor) -> tuple[Tensor, Tensor]:
        calls.append("outer")
        both = torch.tanh(x @ WEIGHT)
        return both[:, :2], both[:, 2:]

    def inner(a: Tensor) -> Tensor:
        calls.append("inner")
        return a.sin().repeat(1, 2)

    return make_again(
        outer,
        lambda a, b: make_again(inner, lambda s: s * s * b.exp().repeat(1, 2), a, on=on) + (a * b).sum(),
        x,
        on=on,
    )


def run(on: bool) -> tuple[list[Tensor], list[str], int]:
    x = torch.arange(300.0).view(100, 3).div(300).requires_grad_()
    WEIGHT.grad = None
    calls: list[str] = []
    with Kept() as kept:
        out = network(x, calls, on)
        out = out * 1  # so that the result itself counts for both
    size = kept.bytes()
    out.square().sum().backward()
    assert WEIGHT.grad is not None
    assert x.grad is not None
    return [out.detach(), x.grad, WEIGHT.grad], calls, size


def test_same_numbers_less_kept_each_made_again_once() -> None:
    want, calls, kept_all = run(False)
    got, calls_again, kept_less = run(True)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert calls == ["outer", "inner"]
    assert sorted(calls_again) == ["inner", "inner", "outer", "outer"]
    assert kept_less <= kept_all - 100 * (4 + 4) * 4  # both halves of the tanh and the repeated sine


def test_nothing_stays_after_the_backward_pass() -> None:
    with Kept() as kept:
        x = torch.ones(100, 3, requires_grad=True)
        network(x, [], True).sum().backward()
        x.grad = None
    del x
    WEIGHT.grad = None
    assert kept.bytes() == 0


def test_an_abandoned_graph_is_freed() -> None:
    with Kept() as kept:
        network(torch.ones(100, 3, requires_grad=True), [], True)
    assert kept.bytes() == 0


def test_a_function_that_hands_its_input_on() -> None:
    x = torch.ones(3, requires_grad=True)
    make_again(lambda x: x, lambda y: (y * y).sum(), x, on=True).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0, 2.0]


def test_on_the_host_there_is_one_copy_for_all_calls_until_their_backward_pass() -> None:
    def run(on_host: bool) -> tuple[list[Tensor], int]:
        x = torch.arange(300.0).view(100, 3).div(300).requires_grad_()
        WEIGHT.grad = None
        with Kept() as kept:
            h = x * 1
            a = again(lambda h: (h @ WEIGHT).sin(), h, on=True, on_host=on_host)
            b = again(lambda h, a: (h @ WEIGHT) * a, h, a, on=True, on_host=on_host)
            out = again(lambda a, b: (a * b).sum(), a, b, on=True, on_host=on_host)
            del h, a, b
        size = kept.bytes()
        out.backward()
        assert x.grad is not None
        assert WEIGHT.grad is not None
        return [out.detach(), x.grad, WEIGHT.grad], size

    (want, kept), (got, copied) = run(False), run(True)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert copied == kept == 4 * 100 * (3 + 4 + 4) + 4
    assert not recompute._on_host


def test_memory_that_is_used_again_is_copied_again() -> None:
    total = torch.zeros(())
    for value in (1.0, 2.0, 3.0):  # what the first call took is freed and likely takes the next one's place
        x = torch.full((1000,), value, requires_grad=True)
        total = total + again(lambda y: (y * y).sum(), x * 1, on=True, on_host=True)
    y = torch.ones(4, requires_grad=True) * 1
    first = again(lambda y: (y * y).sum(), y, on=True, on_host=True)
    with torch.no_grad():
        y.detach().mul_(3)
    second = again(lambda y: (y * y).sum(), y, on=True, on_host=True)
    assert float(first), float(second) == (4.0, 36.0)
    assert len(recompute._on_host) == 5
    total.backward()
    assert float(total) == 14000.0
    del first, second
    assert not recompute._on_host


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_sum_of_parts(wrapped: bool) -> None:
    found: list[list[Tensor]] = []
    for parts in ([(0, 4)], [(0, 3), (3, 1)]):
        x = torch.arange(300.0).view(100, 3).div(300).requires_grad_()
        weight: Any = torch.nn.Parameter(WEIGHT.detach().clone())
        if wrapped:
            weight.main_grad = torch.ones(3, 4)

        def sines(part: tuple[int, int], x: Tensor, weight: Any = weight) -> Tensor:
            return (x @ part_of(weight, 1, *part)).sin().sum(1)

        out = sum_again(sines, parts, x)
        out.square().sum().backward()
        assert x.grad is not None
        found.append([out.detach(), x.grad, weight.main_grad - 1 if wrapped else weight.grad])
        assert not wrapped or weight.grad_added_to_main_grad
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two)
    x = torch.arange(300.0).view(100, 3).div(300)
    expected = 2 * (x @ WEIGHT).sin().sum(1)[:, None] * (x @ WEIGHT).cos()
    torch.testing.assert_close(found[0][2], (x.T @ expected).detach())


@pytest.mark.parametrize("on", [False, True])
def test_without_gradients_it_is_a_plain_call(on: bool) -> None:
    calls: list[str] = []
    with torch.no_grad():
        network(torch.ones(2, 3), calls, on)
        again(lambda x: x, torch.ones(1), on=on)
    assert calls == ["outer", "inner"]


@pytest.mark.gpu
@pytest.mark.parametrize("selective", [False, True])
def test_work_on_a_stream_of_its_own(selective: bool) -> None:
    """Two users of one dropped value, one of them beside the other: as one after the other.

    The sums of their gradients are taken in another order then; each way repeats bit for bit.
    """
    weight = torch.randn(2048, 2048, device="cuda", requires_grad=True)

    def run(on: bool) -> list[Tensor]:
        x = torch.linspace(-1, 1, 2048 * 2048, device="cuda").view(2048, 2048).requires_grad_()

        def use(h: Tensor) -> Tensor:
            result = beside(lambda h: (h @ weight).sin() @ weight.T, h, on=on)
            return (h * h.cos()) @ weight + result()

        out = make_again(torch.tanh, use, x, on=selective)
        return [out.detach(), *torch.autograd.grad(out.square().mean(), [x, weight])]

    want, first = run(False), run(True)
    for a, b in zip(first, want, strict=True):
        assert (a - b).abs().max() < 1e-6 * b.abs().max()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(run(True), first, strict=True))
