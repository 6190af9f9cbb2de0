"""Delta-rule algebra inside chunks: score tiles, the triangular inverse, and both derivatives.

With A = strict lower of k_i . e^(G_i - G_j) k_j and beta on its rows, the writes of a chunk are
U = (I + beta A)^-1 beta (V - K_in S), its outputs O = Q_in S + A_q U, and the state after it
S' = e^(G_C) S + K_out^T U (k3 report eq. 4 with the UT transform of Kimi Linear). Everything is affine in S.

Axes: n chunks, l lanes (row and head), 2 tiles, T tokens of a tile, k key and v value channels; B = n * l.
Masks drop what overflowed: a tile's unmasked exponents lie in +-80, masked ones may be infinite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from k3train.kernels.kda.chunk_plan import CHUNK, TILE, ChunkPlan

_HALF = TILE // 2


def apply_lower(diagonal: Tensor, below: Tensor, x: Tensor) -> Tensor:
    """Block lower triangular matrix times ``x``: [B, 2, T, T], [B, T, T], [B, 2, T, c] -> [B, 2, T, c]."""
    out = torch.matmul(diagonal, x)
    out[:, 1].baddbmm_(below, x[:, 0])
    return out


def apply_lower_transposed(diagonal: Tensor, below: Tensor, x: Tensor) -> Tensor:
    """The transpose of ``apply_lower``."""
    out = torch.matmul(diagonal.mT, x)
    out[:, 0].baddbmm_(below.mT, x[:, 1])
    return out


def sum_before(plan: ChunkPlan, x: Tensor) -> Tensor:
    """Sum over a token and its predecessors in its document and tile: [n, r, 2, T, c] -> same.

    A product with 0/1 matrices: other documents add exact zeros, so they cannot change the rounding either.
    """
    return torch.matmul(plan.pairs[:, None].to(x.dtype), x)


def sum_after(plan: ChunkPlan, x: Tensor) -> Tensor:
    """Sum over a token and its successors in its document and chunk: [n, r, 2, T, c] -> same."""
    out = torch.matmul(plan.pairs[:, None].to(x.dtype).mT, x)
    out[:, :, 0] += torch.matmul(plan.below[:, None].to(x.dtype).mT, x[:, :, 1])
    return out


@dataclass(kw_only=True, slots=True)
class Decays:
    """Products of e^g over spans of a chunk."""

    left: Tensor
    """[n, l, 2, T, k]: ``start`` times 2^centre; left_i * right_j is the decay between j and i."""
    right: Tensor
    """[n, l, 2, T, k]: inverse of ``left``."""
    start: Tensor
    """[n, l, 2, T, k]: from the tile's start through the token."""
    end: Tensor
    """[n, l, 2, T, k]: from after the token to the tile's end; zero outside the tile's last document."""
    entering: Tensor
    """[n, l, 2, T, k]: from the chunk's start; zero outside the document that came in."""
    leaving: Tensor
    """[n, l, 2, T, k]: from after the token to the chunk's end; zero outside the last document."""
    whole: Tensor
    """[n, l, k]: over the whole chunk; zero when a document starts in it."""


def make_decays(plan: ChunkPlan, G: Tensor, lower_bound: float) -> Decays:
    """Decays from ``G`` [n, l, 2, T, k]: sums by ``sum_before`` of log-decays above ``lower_bound``.

    The centre is the middle of what a tile can decay: e^G alone would underflow, its inverse overflow. It is
    a power of two and e^G is made of two halves, so that centring costs no digits (e^(G + 80) costs two).
    """
    centre = round(TILE * -lower_bound / 2 / math.log(2))
    half = (G / 2).exp_()
    start = half * half
    left = (half * 2.0 ** (centre // 2)).mul_(half.mul_(2.0 ** (centre - centre // 2)))
    total = G[:, :, :, -1:]
    end = (total - G).masked_fill_(~plan.tile_tail[:, None, :, :, None], float("-inf")).exp_()
    total = total.exp()
    entering = start.clone()
    entering[:, :, 1] *= total[:, :, 0]
    leaving = end.clone()
    leaving[:, :, 0] *= total[:, :, 1]
    return Decays(
        left=left,
        right=left.reciprocal(),
        start=start,
        end=end,
        entering=entering.mul_(plan.head[:, None, :, :, None]),
        leaving=leaving.mul_(plan.tail[:, None, :, :, None]),
        whole=(total[:, :, 0, 0] * total[:, :, 1, 0]).mul_(plan.whole[:, None, None]),
    )


@dataclass(kw_only=True, slots=True)
class Scores:
    """Decayed inner products of a chunk and what they were made of."""

    query: Tensor
    """[B, 2, T, T] lower: q_i . e^(G_i - G_j) k_j within tiles."""
    query_below: Tensor
    """[B, T, T]: the same for rows of the second tile and columns of the first."""
    key_below: Tensor
    """[B, T, T]: beta_i k_i . e^(G_i - G_j) k_j there."""
    inverse: Tensor
    """[B, 2, T, T]: (I + beta A)^-1 of each tile's block."""
    rows: Tensor
    """[B, 2, 2T, k]: q, then k, times ``Decays.left``."""
    columns: Tensor
    """[B, 2, T, k]: k times ``Decays.right``."""
    rows_below: Tensor
    """[B, 2T, k]: q, then k, of the second tile times ``Decays.start``."""
    columns_below: Tensor
    """[B, T, k]: k of the first tile times ``Decays.end``."""


def make_scores(plan: ChunkPlan, decays: Decays, q: Tensor, k: Tensor, beta: Tensor) -> Scores:
    """Scores of q, k [n, l, 2, T, k] and beta [n, l, 2, T, 1]."""
    n, lanes, channels = *q.shape[:2], q.shape[-1]
    B = n * lanes
    zero = q.new_zeros(())
    rows = q.new_empty(n, lanes, 2, 2, TILE, channels)
    torch.mul(q, decays.left, out=rows[:, :, :, 0])
    torch.mul(k, decays.left, out=rows[:, :, :, 1])
    rows = rows.view(B, 2, 2 * TILE, channels)
    columns = (k * decays.right).view(B, 2, TILE, channels)
    first, second = decays.end[:, :, 0], decays.start[:, :, 1]
    rows_below = q.new_empty(n, lanes, 2, TILE, channels)
    torch.mul(q[:, :, 1], second, out=rows_below[:, :, 0])
    torch.mul(k[:, :, 1], second, out=rows_below[:, :, 1])
    rows_below = rows_below.view(B, 2 * TILE, channels)
    columns_below = (k[:, :, 0] * first).view(B, TILE, channels)

    within = torch.matmul(rows, columns.mT).view(n, lanes, 2, 2, TILE, TILE)
    query = torch.where(plan.pairs[:, None], within[:, :, :, 0], zero)
    key = torch.where(plan.strict[:, None], within[:, :, :, 1], zero).mul_(beta)
    below = torch.matmul(rows_below, columns_below.mT).view(n, lanes, 2, TILE, TILE)
    below.masked_fill_(~plan.below[:, None, None], 0)
    return Scores(
        query=query.view(B, 2, TILE, TILE),
        query_below=below[:, :, 0].reshape(B, TILE, TILE),
        key_below=(below[:, :, 1] * beta[:, :, 1]).view(B, TILE, TILE),
        inverse=_invert(key.view(B * 2, TILE, TILE)).view(B, 2, TILE, TILE),
        rows=rows,
        columns=columns,
        rows_below=rows_below,
        columns_below=columns_below,
    )


def _invert(A: Tensor) -> Tensor:
    """(I + A)^-1 for strictly lower ``A`` [m, T, T]: half blocks by substitution, then one merge.

    Substitution because powers of A (Neumann doubling) lose four digits when keys are nearly equal.
    """
    first, second = A[:, :_HALF, :_HALF], A[:, _HALF:, _HALF:]
    halves = torch.stack([first, second])
    eye = torch.eye(_HALF, dtype=A.dtype, device=A.device).expand_as(halves)
    first, second = torch.linalg.solve_triangular(halves, eye, upper=False, unitriangular=True)
    out = torch.zeros_like(A)
    out[:, :_HALF, :_HALF] = first
    out[:, _HALF:, _HALF:] = second
    out[:, _HALF:, :_HALF] = -torch.bmm(second, torch.bmm(A[:, _HALF:, :_HALF], first))
    return out


def solve(scores: Scores, x: Tensor) -> Tensor:
    """(I + beta A)^-1 x over the chunk: [B, 2, T, c] -> same."""
    out = torch.empty_like(x)
    torch.bmm(scores.inverse[:, 0], x[:, 0], out=out[:, 0])
    rest = torch.baddbmm(x[:, 1], scores.key_below, out[:, 0], alpha=-1)
    torch.bmm(scores.inverse[:, 1], rest, out=out[:, 1])
    return out


def solve_transposed(scores: Scores, x: Tensor) -> Tensor:
    """(I + beta A)^-T x over the chunk: [B, 2, T, c] -> same."""
    out = torch.empty_like(x)
    torch.bmm(scores.inverse[:, 1].mT, x[:, 1], out=out[:, 1])
    rest = torch.baddbmm(x[:, 0], scores.key_below.mT, out[:, 1], alpha=-1)
    torch.bmm(scores.inverse[:, 0].mT, rest, out=out[:, 0])
    return out


@dataclass(kw_only=True, slots=True)
class AffineChunk:
    """What a chunk does to the state S [k, v] that enters it."""

    read: Tensor
    """[n, l, C, k]: outputs are own + read @ S."""
    own: Tensor
    """[n, l, C, v]"""
    transition: Tensor
    """[n, l, k, k]: the state after the chunk is written + transition @ S."""
    written: Tensor
    """[n, l, k, v]"""


def chunk_forward(
    plan: ChunkPlan, decays: Decays, q: Tensor, k: Tensor, v: Tensor, beta: Tensor
) -> AffineChunk:
    """The affine form of every chunk, from q (scaled) and k (unit) [n, l, 2, T, k], v [n, l, 2, T, v] and
    beta [n, l, 2, T, 1].
    """
    n, lanes = q.shape[:2]
    values = v.shape[-1]
    scores = make_scores(plan, decays, q, k, beta)
    right = torch.cat([v, k * decays.entering], -1).mul_(beta).view(n * lanes, 2, TILE, -1)
    writes = solve(scores, right)
    seen = apply_lower(scores.query, scores.query_below, writes).view(n, lanes, CHUNK, -1)
    out_keys = (k * decays.leaving).view(n * lanes, CHUNK, -1)
    change = torch.bmm(out_keys.mT, writes.view(n * lanes, CHUNK, -1)).view(n, lanes, q.shape[-1], -1)
    transition = torch.diag_embed(decays.whole).sub_(change[..., values:])
    read = (q * decays.entering).view(n, lanes, CHUNK, -1).sub_(seen[..., values:])
    return AffineChunk(read=read, own=seen[..., :values], transition=transition, written=change[..., :values])


@dataclass(kw_only=True, slots=True)
class ChunkGradients:
    """Gradients of one group of chunks; shapes of the inputs of ``chunk_forward``."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta_logit: Tensor
    """With respect to the argument of the sigmoid that made beta."""
    G: Tensor
    """With respect to the log-decay summed from the chunk's start."""


def chunk_backward(
    plan: ChunkPlan,
    decays: Decays,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: Tensor,
    grad_out: Tensor,
    grad_state: Tensor,
) -> ChunkGradients:
    """Derivative of ``chunk_forward`` followed by its use.

    ``state`` [n, l, k, v] enters the chunk; ``grad_out`` [n, l, 2, T, v] and ``grad_state`` [n, l, k, v], of
    the state that leaves it, come from after. The diagonal of the query scores does not depend on the gate;
    it is kept out of the products that feed G, where its two parts would cancel only in exact arithmetic.
    """
    n, lanes, channels, values = *q.shape[:2], q.shape[-1], v.shape[-1]
    B = n * lanes
    scores = make_scores(plan, decays, q, k, beta)
    S, dS = state.reshape(B, channels, values), grad_state.reshape(B, channels, values)
    dO = grad_out.view(B, 2, TILE, values)
    in_keys = (k * decays.entering).view(B, CHUNK, channels)
    out_keys = (k * decays.leaving).view(B, CHUNK, channels)

    right = torch.baddbmm(v.reshape(B, CHUNK, values), in_keys, S, alpha=-1).view(B, 2, TILE, values)
    U = solve(scores, right.mul_(beta.view(B, 2, TILE, 1)))
    dU = apply_lower_transposed(scores.query, scores.query_below, dO)
    dU.view(B, CHUNK, values).baddbmm_(out_keys, dS)
    X = solve_transposed(scores, dU)
    # dbeta = X . U / beta; through the sigmoid the division cancels, so beta = 0 is harmless
    dbeta_logit = (X * U).sum(-1, keepdim=True).view_as(beta) * (1 - beta)
    dV = X * beta.view(B, 2, TILE, 1)

    both = dO.new_empty(B, 2, 2, TILE, values)  # what reaches query rows, then key rows
    both[:, :, 0] = dO
    torch.neg(dV, out=both[:, :, 1])
    within = torch.matmul(both.view(B, 2, 2 * TILE, values), U.mT).view(n, lanes, 2, 2, TILE, TILE)
    within = within.masked_fill_(~plan.strict[:, None, :, None], 0).view(B, 2, 2 * TILE, TILE)
    below = torch.bmm(both[:, 1].reshape(B, 2 * TILE, values), U[:, 0].mT).view(n, lanes, 2, TILE, TILE)
    below = below.masked_fill_(~plan.below[:, None, None], 0).view(B, 2 * TILE, TILE)
    on_diagonal = (dO * U).sum(-1, keepdim=True).view(n, lanes, 2, TILE, 1)

    shape = (n, lanes, 2, 2, TILE, channels)
    rows = torch.matmul(within, scores.columns).view(shape).mul_(decays.left[:, :, :, None])
    rows[:, :, 1].addcmul_(
        torch.bmm(below, scores.columns_below).view(n, lanes, 2, TILE, channels),
        decays.start[:, :, 1, None],
    )
    rows.addcmul_(
        torch.bmm(both.view(B, 2 * CHUNK, values), S.mT).view(shape), decays.entering[:, :, :, None]
    )
    columns = torch.matmul(within.mT, scores.rows).view_as(k).mul_(decays.right)
    columns[:, :, 0].addcmul_(
        torch.bmm(below.mT, scores.rows_below).view(n, lanes, TILE, channels), decays.end[:, :, 0]
    )
    leaving = torch.bmm(U.view(B, CHUNK, values), dS.mT).view_as(k).mul_(decays.leaving)
    columns += leaving

    dq, dk = rows[:, :, :, 0], rows[:, :, :, 1]
    dG = q * dq + k * (dk - columns)
    dG[:, :, 1, -1] += (k * leaving).sum((2, 3)) + decays.whole * (state * grad_state).sum(-1)
    return ChunkGradients(
        q=torch.addcmul(dq, on_diagonal, k),
        k=(dk + columns).addcmul_(on_diagonal, q),
        v=dV.view_as(v),
        beta_logit=dbeta_logit,
        G=dG,
    )
