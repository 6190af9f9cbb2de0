"""Chunked Kimi Delta Attention in plain torch, on CPU and GPU, with a hand-written backward pass.

Chunks are turned into affine maps of the state, many at a time; only the loop that applies those maps is
sequential, one batched product of d x d matrices per chunk. The backward pass keeps the inputs and, per
chunk, the map and the state, and computes everything else again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from k3train.backend.derivative import once_differentiable
from k3train.kernels.kda.chunk_plan import CHUNK, TILE, ChunkPlan, make_plan
from k3train.kernels.kda.reference import L2_EPS, state_dtype
from k3train.kernels.kda.within_chunk import (
    Decays,
    chunk_backward,
    chunk_forward,
    make_decays,
    sum_after,
    sum_before,
)

_GROUP_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Elements of one tensor of a group of chunks: on the CPU its dozen tensors should stay in the cache."""


class StateExchange(Protocol):
    """Joins the states of neighbouring shards of one buffer; see ``context_parallel``."""

    def entering(self, transition: Tensor | None, written: Tensor) -> Tensor:
        """State that enters this shard, whose map is S -> written + transition S (None: 0). All [l, d, d]."""
        ...

    def leaving(self, transition: Tensor | None, gradient: Tensor) -> Tensor:
        """Gradient of the state that leaves this shard, given the map of gradients from right to left."""
        ...


def kda_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    gate_lower_bound: float,
    document: Tensor | None = None,
    continues: bool = False,
    initial_state: Tensor | None = None,
    exchange: StateExchange | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence of ``reference.kda_reference``, 64 tokens at a time.

    q, k, v, z [b, t, h, d] and beta [b, t, h] in any float dtype. ``document`` [t] names each token's
    document (ascending; needs b = 1); None means one document a row. ``continues`` says that the first
    document began before the buffer: only then do ``initial_state`` [b, h, d, d] and what ``exchange`` brings
    reach it. Returns o [b, t, h, d] in the dtype of ``v`` and the state [b, h, d, d] of the last document,
    fp32 (fp64 for fp64 inputs). With ``exchange`` every rank of its group must call this, forward and
    backward.
    """
    assert -5.0 <= gate_lower_bound < 0.0, gate_lower_bound
    call = _Call(
        plan=make_plan(q.shape[1], document, continues=continues, device=q.device),
        lower_bound=gate_lower_bound,
        exchange=exchange,
        transparent=document is None and continues,
    )
    return _Chunked.apply(q, k, v, z, beta, A_log, dt_bias, initial_state, call)  # pyright: ignore


@dataclass(kw_only=True, slots=True)
class _Call:
    plan: ChunkPlan
    lower_bound: float
    exchange: StateExchange | None
    transparent: bool
    """Whether an entering state can reach the end of the buffer."""

    def groups(self, lanes: int, channels: int, device: torch.device) -> Iterator[tuple[int, int]]:
        """Chunk ranges that are worked on together."""
        size = _GROUP_ELEMENTS.get(device.type, _GROUP_ELEMENTS["cuda"])
        step = max(1, size // (lanes * CHUNK * channels))
        for start in range(0, self.plan.num_chunks, step):
            yield start, min(start + step, self.plan.num_chunks)


@dataclass(kw_only=True, slots=True)
class _Group:
    """Inputs of one group of chunks, normalised, in the state's dtype: [n, l, 2, T, channels]."""

    plan: ChunkPlan
    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    decays: Decays
    q_rate: Tensor
    """1 / |q|."""
    k_rate: Tensor
    activation: Tensor
    """Biased decay pre-activation [b, n * C, h, d]."""
    opening: Tensor
    """Its sigmoid, as the gate sees it; same shape."""


def _load(
    call: _Call, start: int, stop: int, inputs: tuple[Tensor, ...], slope: Tensor, bias: Tensor
) -> _Group:
    q, k, v, z, beta = (_cut(x, start, stop) for x in inputs)
    dtype, plan = slope.dtype, call.plan.part(start, stop)
    b, _, h, d = z.shape
    activation = z.to(dtype) + bias.view(h, d)
    opening = torch.sigmoid(activation * slope[:, None])
    opening[:, plan.num_tokens :] = 0  # past the end nothing decays and, below, nothing is written
    g = (call.lower_bound * opening).view(b, plan.num_chunks, 2, TILE, h * d).transpose(0, 1)
    G = sum_before(plan, g).view(plan.num_chunks, b, 2, TILE, h, d).permute(0, 1, 4, 2, 3, 5)
    G = G.reshape(plan.num_chunks, b * h, 2, TILE, d).contiguous()
    b_open = torch.sigmoid(beta.to(dtype))
    b_open[:, plan.num_tokens :] = 0
    q, k = _to_lanes(q, dtype), _to_lanes(k, dtype)
    q_rate = torch.rsqrt(q.square().sum(-1, keepdim=True) + L2_EPS)
    k_rate = torch.rsqrt(k.square().sum(-1, keepdim=True) + L2_EPS)
    return _Group(
        plan=plan,
        q=q * (q_rate * d**-0.5),
        k=k * k_rate,
        v=_to_lanes(v, dtype),
        beta=_to_lanes(b_open[..., None], dtype),
        decays=make_decays(plan, G, call.lower_bound),
        q_rate=q_rate,
        k_rate=k_rate,
        activation=activation,
        opening=opening,
    )


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        z: Tensor,
        beta: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        initial_state: Tensor | None,
        call: _Call,
    ) -> tuple[Tensor, Tensor]:
        b, _, h, d = q.shape
        dtype, lanes, n, values = state_dtype(q), b * h, call.plan.num_chunks, v.shape[-1]
        slope, bias = A_log.to(dtype).exp(), dt_bias.to(dtype)
        read = q.new_empty(n, lanes, CHUNK, d, dtype=dtype)
        own = q.new_empty(n, lanes, CHUNK, values, dtype=dtype)
        transition = q.new_empty(n, lanes, d, d, dtype=dtype)
        written = q.new_empty(n, lanes, d, values, dtype=dtype)
        ranges = list(call.groups(lanes, d, q.device))
        for start, stop in ranges:
            x = _load(call, start, stop, (q, k, v, z, beta), slope, bias)
            chunk = chunk_forward(x.plan, x.decays, x.q, x.k, x.v, x.beta)
            read[start:stop], own[start:stop] = chunk.read, chunk.own
            transition[start:stop], written[start:stop] = chunk.transition, chunk.written

        first = written.new_zeros(lanes, d, values)
        if initial_state is not None:
            first = initial_state.to(dtype).reshape(lanes, d, values)
        total = None
        if call.exchange is not None:
            local = _chain(transition, written, first)[-1]
            total = _product(transition) if call.transparent else None
            first = call.exchange.entering(total, local)
        states = _chain(transition, written, first)

        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        for start, stop in ranges:
            o = own[start:stop].flatten(0, 1)
            o.baddbmm_(read[start:stop].flatten(0, 1), states[start:stop].flatten(0, 1))
            _from_lanes(o.view(stop - start, lanes, 2, TILE, values), out, start)
        ctx.call, ctx.ranges, ctx.has_initial_state = call, ranges, initial_state is not None
        ctx.save_for_backward(q, k, v, z, beta, A_log, dt_bias, read, transition, states, total)
        return out, states[-1].reshape(b, h, d, values).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, z, beta, A_log, dt_bias, read, transition, states, total = ctx.saved_tensors
        call: _Call = ctx.call
        b, _, h, d = q.shape
        dtype, lanes, values = states.dtype, b * h, v.shape[-1]
        slope, bias = A_log.to(dtype).exp(), dt_bias.to(dtype)

        reached = torch.empty_like(states[1:])
        for start, stop in ctx.ranges:
            dO = _to_lanes(_cut(grad_out, start, stop), dtype).view(-1, CHUNK, values)
            torch.bmm(read[start:stop].flatten(0, 1).mT, dO, out=reached[start:stop].flatten(0, 1))
        last = grad_final.to(dtype).reshape(lanes, d, values)
        if call.exchange is not None:
            local = _chain_back(transition, reached, torch.zeros_like(last))[0]
            last = call.exchange.leaving(total, local)
        grad_states = _chain_back(transition, reached, last)

        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, z, beta)]
        grad_slope, grad_bias = torch.zeros_like(slope), torch.zeros_like(bias)
        for start, stop in ctx.ranges:
            x = _load(call, start, stop, (q, k, v, z, beta), slope, bias)
            dO = _to_lanes(_cut(grad_out, start, stop), dtype)
            ahead = grad_states[start + 1 : stop + 1]
            y = chunk_backward(x.plan, x.decays, x.q, x.k, x.v, x.beta, states[start:stop], dO, ahead)
            scale = d**-0.5
            along = (y.q * x.q).sum(-1, keepdim=True) / scale
            _from_lanes((scale * y.q).addcmul_(x.q, along, value=-1).mul_(x.q_rate), grads[0], start)
            along = (y.k * x.k).sum(-1, keepdim=True)
            _from_lanes(y.k.addcmul_(x.k, along, value=-1).mul_(x.k_rate), grads[1], start)
            _from_lanes(y.v, grads[2], start)
            _from_lanes(y.beta_logit, grads[4][..., None], start)
            # the gate: G is a sum over tokens, the rest is element-wise
            dG = y.G.view(stop - start, b, h, 2, TILE, d).permute(0, 1, 3, 4, 2, 5)
            dg = sum_after(x.plan, dG.reshape(stop - start, b, 2, TILE, h * d)).transpose(0, 1)
            # 1 - sigmoid would keep no digits of a saturated gate
            closing = torch.sigmoid(x.activation * -slope[:, None])
            dpre = closing.mul_(x.opening).mul_(call.lower_bound).mul_(dg.reshape(closing.shape))
            grad_slope += (dpre * x.activation).sum((0, 1, 3))
            dpre *= slope[:, None]
            grad_bias += dpre.sum((0, 1)).flatten()
            grads[3][:, start * CHUNK : stop * CHUNK] = dpre[:, : x.plan.num_tokens]
        grad_first = grad_states[0].reshape(b, h, d, values) if ctx.has_initial_state else None
        grad_A = (grad_slope * slope).to(A_log.dtype)
        return *grads, grad_A, grad_bias.to(dt_bias.dtype).view_as(dt_bias), grad_first, None


def _chain(transition: Tensor, written: Tensor, first: Tensor) -> Tensor:
    """States [n + 1, l, k, v] before every chunk and after the last."""
    out = written.new_empty(written.shape[0] + 1, *written.shape[1:])
    out[0] = first
    states = out.unbind()
    for n, (M, B) in enumerate(zip(transition.unbind(), written.unbind(), strict=True)):
        torch.baddbmm(B, M, states[n], out=states[n + 1])
    return out


def _chain_back(transition: Tensor, reached: Tensor, last: Tensor) -> Tensor:
    """Gradients [n + 1, l, k, v] of the same states; ``reached`` is what a chunk's outputs send back."""
    out = reached.new_empty(reached.shape[0] + 1, *reached.shape[1:])
    out[-1] = last
    states, maps, own = out.unbind(), transition.mT.contiguous().unbind(), reached.unbind()
    for n in reversed(range(len(own))):
        torch.baddbmm(own[n], maps[n], states[n + 1], out=states[n])
    return out


def _product(transition: Tensor) -> Tensor:
    """Transition [l, k, k] over all chunks."""
    total = transition[0]
    for M in transition[1:].unbind():
        total = torch.bmm(M, total)
    return total


def _cut(x: Tensor, start: int, stop: int) -> Tensor:
    """Tokens of chunks [start, stop) of ``x`` [b, t, ...], zeros past the end."""
    part = x[:, start * CHUNK : stop * CHUNK]
    missing = (stop - start) * CHUNK - part.shape[1]
    return F.pad(part, (0, 0) * (x.ndim - 2) + (0, missing)) if missing else part


def _to_lanes(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[b, n * C, h, c] -> contiguous [n, b * h, 2, T, c]."""
    b, _, h, c = x.shape
    tiles = x.unflatten(1, (-1, 2, TILE)).permute(1, 0, 4, 2, 3, 5)
    return tiles.to(dtype).reshape(-1, b * h, 2, TILE, c).contiguous()


def _from_lanes(x: Tensor, out: Tensor, start: int) -> None:
    """Write ``x`` [n, b * h, 2, T, c] over the tokens of ``out`` [b, t, h, c] from chunk ``start`` on."""
    b, t, h, c = out.shape
    n = x.shape[0]
    stop = min(t, (start + n) * CHUNK)
    rows = x.view(n, b, h, CHUNK, c).permute(1, 0, 3, 2, 4).reshape(b, n * CHUNK, h, c)
    out[:, start * CHUNK : stop] = rows[:, : stop - start * CHUNK]
