"""Kimi Delta Attention for the model: documents, shards and the path that computes them."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from k3train.kernels.kda.chunked import kda_chunked
from k3train.kernels.kda.context_parallel import ContextParallelExchange
from k3train.kernels.kda.reference import state_dtype
from k3train.kernels.kda.segments import Ends
from k3train.kernels.kda.triton_kda import Keep, is_available, triton_kda
from k3train.kernels.packing import Packing, check_packed


@lru_cache
def choose(
    device: torch.device, dtype: torch.dtype, head_dim: int, gate_lower_bound: float
) -> tuple[bool, str]:
    """Whether the Hopper kernels compute such a layer, and in a few words why or why not."""
    if device.type != "cuda":
        return False, f"the device is {device.type}"
    available, reason = is_available(device, dtype, head_dim, gate_lower_bound)
    return available, reason or f"bf16, head dimension {head_dim}"


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    gate_lower_bound: float,
    packing: Packing | None = None,
    cp_group: Any = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    keep: Keep = "nothing",
) -> tuple[Tensor, Tensor | None]:
    """Attend with the gated delta rule (k3 report eq. 1-6) and return (o, final states or None).

    q, k, v, z [b, t, h, d]: this context-parallel rank's tokens and this tensor-parallel rank's heads, after
    convolution and SiLU; q and k are not yet normalised, z is the decay's pre-activation without its bias.
    beta [b, t, h] are logits. A_log [h] and dt_bias [h * d] are read in fp32. o has the shape and dtype of v.

    Without ``packing`` every row is one document, sharded over ``cp_group`` in rank order; with it b must be
    1. States are fp32 [documents (or b), h, d, d], key channel before value channel, and only for whole
    documents, that is without context parallelism.

    ``keep`` trades memory for a shorter backward pass where the path can, see ``triton_kda``.
    With a ``cp_group`` of several ranks every rank of it must call this, forward and backward.
    Raises ValueError for shapes that do not belong together, those of packed documents and states among them,
    and for a bound outside [-5, 0).
    """
    inputs = q, k, v, z, beta, A_log, dt_bias
    _check_shapes(q, {"k": k, "v": v, "z": z, "beta": beta, "A_log": A_log, "dt_bias": dt_bias})
    if not -5 <= gate_lower_bound < 0:
        raise ValueError(f"gate_lower_bound = {gate_lower_bound:g} must be at least -5 and less than 0")
    sharded = cp_group is not None and cp_group.size() > 1
    if sharded and (initial_state is not None or output_final_state):
        raise ValueError("initial and final states need whole documents: run with context parallel degree 1")
    if packing is not None:
        check_packed(q, packing)
    if initial_state is not None:
        _check_states(initial_state, q, packing)
    if q.shape[0] == 0 or q.shape[2] == 0:
        return _nothing(*inputs), _no_states(q, packing) if output_final_state else None
    same_dtype = all(x.dtype is q.dtype for x in (k, v, z, beta))
    exchange = ContextParallelExchange(cp_group) if sharded else None
    if q.numel() and same_dtype and choose(q.device, q.dtype, q.shape[-1], gate_lower_bound)[0]:
        return triton_kda(
            *inputs,
            gate_lower_bound=gate_lower_bound,
            packing=packing,
            initial_state=initial_state,
            output_final_state=output_final_state,
            exchange=exchange,
            ends=_ends(packing, cp_group) if sharded else None,
            keep=keep,
        )
    if packing is not None and (initial_state is not None or output_final_state):
        return _each_document(
            (q, k, v, z, beta), A_log, dt_bias, gate_lower_bound, packing.local_cu_seqlens, initial_state
        )
    rank = cp_group.rank() if cp_group is not None else 0
    if packing is None:
        document, continues = None, initial_state is not None or rank > 0
    else:
        single = len(packing.local_cu_seqlens) == 2
        document = None if single else packing.local_document
        continues = sharded and packing.continues_from_left
    o, final_state = kda_chunked(
        *inputs,
        gate_lower_bound=gate_lower_bound,
        document=document,
        continues=continues,
        initial_state=initial_state,
        exchange=exchange,
    )
    return o, final_state if output_final_state else None


def _check_shapes(q: Tensor, others: dict[str, Tensor]) -> None:
    """Kernels read whatever lies in memory behind a tensor that is too small."""
    if q.ndim != 4:
        raise ValueError(f"q has shape {tuple(q.shape)}: kda needs [b, t, h, d]")
    whole, heads, channels = tuple(q.shape), q.shape[2], q.shape[3]
    shapes = {"beta": whole[:3], "A_log": (heads,), "dt_bias": (heads * channels,)}
    for name, tensor in others.items():
        wanted = shapes.get(name, whole)
        if tuple(tensor.shape) != wanted:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}: with q [b, t, h, d] = {list(whole)} kda needs "
                f"{wanted}"
            )


def _states_shape(q: Tensor, packing: Packing | None) -> tuple[int, ...]:
    documents = q.shape[0] if packing is None else len(packing.local_cu_seqlens) - 1
    heads, channels = q.shape[2:]
    return documents, heads, channels, channels


def _check_states(states: Tensor, q: Tensor, packing: Packing | None) -> None:
    wanted = _states_shape(q, packing)
    if tuple(states.shape) != wanted:
        raise ValueError(
            f"initial_state has shape {tuple(states.shape)}: kda needs [documents (or b), h, d, d] = {wanted}"
        )


def _nothing(
    q: Tensor, k: Tensor, v: Tensor, z: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor
) -> Tensor:
    """o without rows or heads; every input takes part, so that its gradient is there."""
    return (q + k + v + z + beta[..., None] + A_log[:, None] + dt_bias.view(q.shape[2:])).to(v.dtype)


def _no_states(q: Tensor, packing: Packing | None) -> Tensor:
    return q.new_empty(_states_shape(q, packing), dtype=state_dtype(q))


def _ends(packing: Packing | None, cp_group: Any) -> Ends:
    """Which documents of this shard began on the rank before and go on on the next; all or none of rows."""
    if packing is None:
        first, last = cp_group.rank() == 0, cp_group.rank() == cp_group.size() - 1
        return Ends(enters="" if first else "all", leaves="" if last else "all", shared=True)
    return Ends(
        enters="first" if packing.continues_from_left else "",
        leaves="last" if packing.continues_to_right else "",
        shared=True,
    )


def _each_document(
    inputs: tuple[Tensor, ...],
    A_log: Tensor,
    dt_bias: Tensor,
    gate_lower_bound: float,
    borders: tuple[int, ...],
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """One call a document, for those rare callers that bring or want the states of all of them."""
    outputs, states = [], []
    for i, (start, stop) in enumerate(pairwise(borders)):
        q, k, v, z, beta = (x[:, start:stop] for x in inputs)
        o, state = kda_chunked(
            q,
            k,
            v,
            z,
            beta,
            A_log,
            dt_bias,
            gate_lower_bound=gate_lower_bound,
            continues=initial_state is not None,
            initial_state=None if initial_state is None else initial_state[i : i + 1],
        )
        outputs.append(o)
        states.append(state)
    return torch.cat(outputs, 1), torch.cat(states)
