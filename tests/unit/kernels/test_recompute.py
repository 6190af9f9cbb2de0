"""Dropping what is cheap to make again: same numbers, less kept, each value made again once."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from k3train.kernels.beside import beside
from k3train.kernels.recompute import again, make_again

WEIGHT = torch.nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))


class Kept(TorchDispatchMode):
    """Counts the bytes of storages made inside and still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.outside: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given, made = ([x for x in tree_leaves(each) if isinstance(x, Tensor)] for each in (args, out))
        self.outside |= {x.untyped_storage().data_ptr() for x in given} - self.storages.keys()
        for x in made:
            storage = x.untyped_storage()
            if storage.data_ptr() not in self.outside:
                self.storages[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        return out

    def bytes(self) -> int:
        """Bytes alive now."""
        gc.collect()
        return sum(size for ref, size in self.storages.values() if not ref.expired())


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
