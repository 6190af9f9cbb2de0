"""KDA on Hopper: forward in three kernels, backward in five; saved are inputs and output, and what is asked.

Forward: ``kda_prep`` and ``kda_inverse`` turn every chunk of 64 tokens into the operands of the chain (768
bytes of q, k and z per token and head in, 1040 out), ``kda_output`` runs the documents. Backward computes
the operands again but for those that were kept, chains through the states once more (storing them, without
the output), then the chain of state gradients, the pairs within chunks and the gradients. q, k, v, z and
their gradients are bf16; states are fp32. Where documents are cut into segments, or shared with other ranks,
``triton_states`` adds the maps of the segments and a scan, and the states between segments are saved too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from k3train.backend.derivative import once_differentiable
from k3train.kernels.beside import launched_beside
from k3train.kernels.hopper import is_hopper
from k3train.kernels.kda.chunked import StateExchange
from k3train.kernels.kda.segments import CHUNK, Ends, Tables, longest_segment, tables, upload
from k3train.kernels.kda.triton_states import (
    chain,
    chain_back,
    descriptor,
    gradients_leaving,
    launch,
    states_entering,
)
from k3train.kernels.packing import Packing

Keep = Literal["nothing", "scores", "operands"]
_SCORES = ("tb", "aqk", "dec", "rs")
KEPT: dict[Keep, tuple[str, ...]] = {
    "nothing": (),
    "scores": _SCORES,
    "operands": ("kh", "kt", "qh", *_SCORES),
}
"""Of every chunk, see ``triton_prep``. The scores, a fifth of the bytes, are most of the work."""
HEAD_DIM = 128
STRONGEST_BOUND = -5.0
"""Below it e^(31/2 |bound|), the largest factor within a block of 32 tokens, leaves the range of bf16."""


def is_available(
    where: torch.device | str, dtype: torch.dtype, head_dim: int, gate_lower_bound: float
) -> tuple[bool, str]:
    """Whether ``triton_kda`` can serve such tensors, and the reason when it cannot."""
    works, reason = is_hopper(where)
    if not works:
        return False, reason
    if dtype != torch.bfloat16:
        return False, f"it reads bfloat16, the tensors are {dtype}"
    if head_dim != HEAD_DIM:
        return False, f"it needs head dimension {HEAD_DIM}, the model has {head_dim}"
    if not STRONGEST_BOUND <= gate_lower_bound < 0:
        return (
            False,
            f"it holds for gate lower bounds in [{STRONGEST_BOUND}, 0), the model has {gate_lower_bound}",
        )
    return True, ""


def triton_kda(
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
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    exchange: StateExchange | None = None,
    ends: Ends | None = None,
    keep: Keep = "nothing",
) -> tuple[Tensor, Tensor | None]:
    """Attend with the gated delta rule (k3 report eq. 1-6) and return (o, final states or None).

    q, k, v, z bf16 [b, t, h, 128]: after convolution and SiLU; q and k are not yet normalised, z is the
    decay's pre-activation without its bias. beta [b, t, h] are logits. A_log [h] and dt_bias [h * 128] are
    read in fp32. With ``packing`` b is 1 and documents do not see each other; without it every row is one
    document. States are fp32 [documents or b, h, 128, 128], key channel before value channel. Every
    gradient is deterministic.

    With ``exchange`` the buffer is a shard, and ``ends`` says which documents go on in its neighbours: every
    rank of the exchange's group must call this, forward and backward, and there are no states in and out.
    The backward pass computes everything again from the inputs and o, unless told to ``keep`` the scores of
    the chunks, 276 bytes a token and head, or all their operands, 1.0 kB.
    """
    b, t, h, d = q.shape
    borders = packing.local_cu_seqlens if packing is not None else tuple(range(0, b * t + 1, t))
    rows = [x.reshape(b * t, *x.shape[2:]).contiguous() for x in (q, k, v, z, beta)]
    if exchange is None:
        ends = Ends(enters="all" if initial_state is not None else "")
    if initial_state is not None:
        initial_state = initial_state.float().contiguous()
    assert ends is not None
    call = _Call(borders, h, ends, exchange, gate_lower_bound, q.device, keep)
    o, final = _Kda.apply(*rows, A_log.float(), dt_bias.float(), initial_state, call, output_final_state)
    return o.view(b, t, h, d), final if output_final_state else None


class _Call:
    """What one call and its backward pass share."""

    def __init__(
        self,
        borders: tuple[int, ...],
        heads: int,
        ends: Ends,
        exchange: StateExchange | None,
        bound: float,
        device: torch.device,
        keep: Keep = "nothing",
    ) -> None:
        self.kept = KEPT[keep]
        self.borders, self.heads, self.device = borders, heads, device
        self.ends, self.exchange, self.bound = ends, exchange, bound
        self.longest = longest_segment(borders, heads, ends)
        self.chunks = chunk_table(borders, device)
        self.num_chunks = len(self.chunks)
        self.num_documents = len(borders) - 1
        self.shared = self.num_documents if "all" in (ends.enters, ends.leaves) else 1
        """Documents whose states shards exchange, if any."""

    def tables(self, *, backward: bool, has_gradient: bool = False) -> Tables:
        """Rows of one direction; ``has_gradient`` of the final states."""
        ends = self.ends
        if has_gradient:
            ends = replace(ends, leaves="all")
        return tables(self.borders, self.heads, ends, backward, self.longest, self.device)


@lru_cache(maxsize=32)
def chunk_table(borders: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 [chunks, 2]: first token, tokens from there to the document's end."""
    rows = [(c, stop - c) for start, stop in pairwise(borders) for c in range(start, stop, CHUNK)]
    return upload({"chunks": rows}, device)["chunks"]


def _operands(inputs: tuple[Tensor, ...], call: _Call, scores: dict[str, Tensor] | None = None):
    """Run ``kda_prep`` and ``kda_inverse``: [chunks, h, 64, .] tiles by name, all but ``scores`` if given."""
    from k3train.kernels.kda.triton_inverse import kda_inverse
    from k3train.kernels.kda.triton_prep import kda_prep

    q, k, _, z, beta, A_log, dt_bias = inputs
    n, h, d = call.num_chunks, q.shape[1], q.shape[2]
    tiles = {name: q.new_empty(n, h, CHUNK, d) for name in ("kh", "kt", "qh")}
    if scores is None:
        tiles |= {name: q.new_empty(n, h, CHUNK, CHUNK) for name in ("tb", "aqk")}
        tiles["dec"] = q.new_empty(n, h, d, dtype=torch.float32)
        tiles["rs"] = q.new_empty(n, h, 3 * CHUNK, dtype=torch.float32)
    else:
        tiles |= scores
    # scores sum over all channels; without them smaller programs keep more copies under way
    block = d if scores is None else d // 2
    akk, shift = tiles["tb"].view(torch.float16), _shift(call.bound)
    rows = [descriptor(x.view(-1, h * d), CHUNK, block) for x in (q, k, z)]
    out = [descriptor(tiles[name], CHUNK, block) for name in ("kh", "kt", "qh")]
    launch(
        kda_prep, (n * h * d // block,),
        *rows, beta, A_log, dt_bias, *out, akk, tiles["aqk"], tiles["dec"], tiles["rs"],
        call.chunks, d**-0.5, call.bound, shift, 2.0**-shift,
        H=h, D=d, BD=block, SCORES=scores is None, num_warps=block // 16, maxnreg=128,
    )  # fmt: skip
    if scores is None:
        squares = [descriptor(x, CHUNK, CHUNK) for x in (akk, tiles["tb"])]
        launch(kda_inverse, (n * h,), *squares, num_warps=4)
    return tiles


def _shift(bound: float) -> float:
    """Half of the largest log2 decay over a block of 32 tokens."""
    return (CHUNK // 2 - 1) * abs(bound) / 2 * 1.4426950408889634


class _Kda(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, z, beta, A_log, dt_bias, initial, call, want_final):
        h, d = q.shape[1:]
        x = _operands((q, k, v, z, beta, A_log, dt_bias), call)
        table = call.tables(backward=False)
        entering, transitions, whole = states_entering(x, v, initial, table, call.exchange, call.shared)
        o = torch.empty_like(v)
        final = x["dec"].new_empty(call.num_documents, h, d, d) if want_final else None
        chain(x, v, table, "output", entering, final, o=o)
        kept = [x[name] for name in call.kept]
        states = (entering, transitions, whole)
        ctx.save_for_backward(q, k, v, z, beta, A_log, dt_bias, initial, o, *states, *kept)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do, dfinal):
        q, k, v, z, beta, A_log, dt_bias, initial, o, *saved = ctx.saved_tensors
        # autograd's threads begin without a CUDA context, which tensor maps need: an ordinary launch sets it
        o.new_zeros(1)
        do = torch.zeros_like(o) if do is None else do.contiguous()
        dfinal = None if dfinal is None else dfinal.contiguous()
        inputs = (q, k, v, z, beta, A_log, dt_bias)
        x = dict(zip(ctx.call.kept, saved[3:], strict=True))
        return (*_backward(inputs, initial, o, saved[:3], x, do, dfinal, ctx.call), None, None)


def _backward(inputs, initial, o, between, x, do, dfinal, call):
    q, _, v, *_ = inputs
    entering, transitions, whole = between
    n, (h, d) = call.num_chunks, q.shape[1:]
    x = x if "qh" in x else _operands(inputs, call, x or None)
    table = call.tables(backward=True, has_gradient=dfinal is not None)
    hs, dhs = q.new_empty(n, h, d, d), q.new_empty(n, h, d, d)
    us, dv = q.new_empty(n, h, CHUNK, d), torch.empty_like(v)
    dinitial = torch.empty_like(initial) if initial is not None else None
    forward = call.tables(backward=False)
    # maps leave processors idle at their end; whole documents gain nothing, and an exchange waits for ranks
    idle = bool(table.plan.maps) and call.exchange is None
    states = partial(chain, x, v, forward, "states", entering, None, hs=hs, us=us)
    with launched_beside(states, call.device, on=idle):
        leaving = gradients_leaving(x, do, dfinal, transitions, whole, table, call.exchange, call.shared)
        chain_back(x, do, table, "back", leaving, dinitial, dhs=dhs, dv=dv)
    rs = x["rs"]
    del x, states
    dq, dk, dz, dbeta, dA, dbias = _input_gradients(inputs, o, do, us, dv, hs, dhs, rs, call)
    return dq, dk, dv, dz, dbeta, dA, dbias, dinitial


def _input_gradients(inputs, o, do, us, dv, hs, dhs, rs, call):
    from k3train.kernels.kda.triton_grad import kda_grad
    from k3train.kernels.kda.triton_pairs import kda_pairs

    q, k, v, z, beta, A_log, dt_bias = inputs
    n, (h, d) = call.num_chunks, q.shape[1:]
    dq, dk, dz, dbeta = (torch.empty_like(x) for x in (q, k, z, beta))
    pairs = q.new_empty(n, h, 2, CHUNK, CHUNK)
    sums = q.new_empty(n, h, 4 * CHUNK, dtype=torch.float32)
    dA = q.new_empty(n, h, 2, dtype=torch.float32)
    dbias = q.new_empty(n, h, d, dtype=torch.float32)
    rows = [descriptor(x.view(-1, h * d), CHUNK, d) for x in (do, dv, o, v)]
    wide = [descriptor(x, CHUNK, d) for x in (us, hs, dhs)]
    shift = _shift(call.bound)
    launch(
        kda_pairs, (n * h,),
        *rows[:2], wide[0], *rows[2:], descriptor(pairs, CHUNK, CHUNK), rs, dbeta,
        sums, call.chunks, H=h, V=d, num_warps=4,
    )  # fmt: skip
    launch(
        kda_grad, (2 * n * h,),
        q, k, descriptor(z.view(-1, h * d), CHUNK, 64), A_log, dt_bias, rows[0], wide[0], rows[1],
        *wide[1:], rs,
        descriptor(pairs, 32, 32), sums, dq, dk, dz, dA, dbias, call.chunks,
        d**-0.5, call.bound, shift, 2.0**-shift, H=h, D=d, V=d, num_warps=4,
    )  # fmt: skip
    return dq, dk, dz, dbeta, dA.sum((0, 2)), dbias.sum(0).view(-1)
