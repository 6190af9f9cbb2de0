"""A backward pass without a derivative of its own says so: autograd would leave out what it hides."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the ``backward`` of an autograd Function: with ``create_graph=True`` it is a RuntimeError.

    Only then is it called with gradients on; training, recomputation and schedules take none of it. torch's
    decorator of this name objects only where the gradient that comes in is itself differentiated, and else
    drops the second derivative without a word.
    """
    name = backward.__qualname__.split(".")[-2].lstrip("_")

    @wraps(backward)
    def once(ctx: Any, *grads: Any) -> Any:
        refuse_second(name)
        return backward(ctx, *grads)

    return once


def refuse_second(name: str) -> None:
    """The same for one way through a backward pass, of the function called ``name``."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"k3train's {name} has no second derivative: take its gradient without create_graph=True"
        )
