"""Whether a state is one to keep: NaN and infinity in a weight or moment spread to all of the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from k3train.checkpoint.agree import every_rank
from k3train.checkpoint.state import unwrap
from k3train.config.problems import Stopped
from k3train.optim.build import members, moment_names
from k3train.optim.slices import master_slices

_NAMES_IN_MESSAGE = 3


class NotFinite(Stopped):
    """Training has made NaN or infinity of the state, or of its held-out loss; the message says where."""

    exit_code = 17
    """As of a step that is refused for its numbers: another start would come to the same."""


@torch.no_grad()
def not_finite(chunks: Sequence[Any], optimizer: Any | None) -> list[str]:
    """Names of this rank's parameters, buffers, master weights and moments that hold NaN or infinity.

    Every element is read once, where it lies, and each device is waited for once. With ``optimizer=None``
    only the model is looked at.
    """
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, tensor in _tensors(chunks, optimizer):
        by_device.setdefault(tensor.device, []).append((name, tensor.detach()))
    return [name for named in by_device.values() for name in _not_finite(named)]


def _not_finite(named: Sequence[tuple[str, Tensor]]) -> list[str]:
    """Of tensors on one device."""
    bounds = torch.stack([bound for _, tensor in named for bound in torch.aminmax(tensor)])
    finite = bounds.view(-1, 2).isfinite().all(dim=1).tolist()
    return [name for (name, _), good in zip(named, finite, strict=True) if not good]


def check_finite(step: int, chunks: Sequence[Any], optimizer: Any) -> None:
    """Raise NotFinite, on every rank, when a rank's state after ``step`` steps is not finite.

    Every rank of the world must call this.
    """
    found = every_rank(lambda: not_finite(chunks, optimizer))
    bad = [rank for rank, names in enumerate(found) if names]
    if bad:
        raise NotFinite(
            f"after step {step} {listed(found[bad[0]])} on rank {bad[0]}: no checkpoint of it is written. "
            "The run can go on from its last checkpoint; if the same comes again, lower optim.learning_rate "
            "or raise optim.eps"
        )


def listed(names: Sequence[str]) -> str:
    """The tensors that are not finite, as the beginning of a sentence."""
    more = f" and {len(names) - _NAMES_IN_MESSAGE} more" if len(names) > _NAMES_IN_MESSAGE else ""
    verb = "holds" if len(names) == 1 else "hold"
    return f"{', '.join(names[:_NAMES_IN_MESSAGE])}{more} {verb} NaN or infinity"


def _tensors(chunks: Sequence[Any], optimizer: Any | None) -> Iterator[tuple[str, Tensor]]:
    names: dict[Any, str] = {}
    for chunk in chunks:
        model = unwrap(chunk)
        names |= {param: name for name, param in model.named_parameters()}
        for name, value in model.state_dict().items():
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
                yield name, value
    for member in members(optimizer) if optimizer is not None else ():
        for param, master in master_slices(member).items():
            state = member.optimizer.state[master]
            values = {"master weights": master, **{key: state[key] for key in moment_names(member, param)}}
            yield from ((f"{key} of {names[param]}", value) for key, value in values.items() if value.numel())
