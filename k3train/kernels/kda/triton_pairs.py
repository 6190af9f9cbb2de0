"""Gradients of a chunk's two score matrices, and the row sums that stand for the l2 norms and beta.

Corrections come as W = U / beta; beta joins here. The sums are q.dq = dO.O and k.dk = 2 dV.W - dV.V.

Imports triton: import it inside functions only.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from k3train.kernels.kda.triton_math import bf16, clear_rows
from k3train.kernels.kda.triton_ring import arrived, dismiss, expect, expect_all, fetch, ring


@gluon.jit
def on_diagonal(acc, i, j):
    return gl.sum(gl.where(i == j, acc, 0.0), 1)


@gluon.jit
def kda_pairs(do, dv, us, o, v, pairs, rs, db, sums, chunks, H: gl.constexpr, V: gl.constexpr):
    """Row sums of products are diagonals of matrix products here: no tile is read into registers."""
    C: gl.constexpr = 64
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    LN: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    i_h = gl.program_id(0) % H
    i_c = gl.program_id(0) // H
    first = gl.load(chunks + 2 * i_c)
    left = gl.load(chunks + 2 * i_c + 1)
    b = i_c * H + i_h
    operands = (do, dv, o, v)
    rings = (ring(do, 1), ring(dv, 1), ring(o, 1), ring(v, 1))
    ru = ring(us, 1)
    # not where the operands lie: products still read them when these are written
    sA = gl.allocate_shared_memory(gl.bfloat16, [C, C], pairs.layout)
    sB = gl.allocate_shared_memory(gl.bfloat16, [C, C], pairs.layout)
    expect(us, ru, 0, True)
    expect_all(operands, rings, 0, True)
    fetch(us, b * C, 0, ru, 0, True)
    for n in gl.static_range(4):
        fetch(operands[n], first, i_h * V, rings[n], 0, True)
    r = gl.arange(0, C, gl.SliceLayout(1, MMA))
    i = gl.expand_dims(r, 1)
    j = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(0, MMA)), 0)
    rates = rs + b.to(gl.int64) * (3 * C) + 2 * C
    beta = gl.load(rates + r)
    sdo = arrived(rings[0], 0, 1)
    sdv = arrived(rings[1], 0, 1)
    so = arrived(rings[2], 0, 1)
    sv = arrived(rings[3], 0, 1)
    su = arrived(ru, 0, 1).permute((1, 0))
    if left < C:
        clear_rows(sdo, left, LN)
        clear_rows(sdv, left, LN)
        clear_rows(so, left, LN)
        clear_rows(sv, left, LN)
        fence_async_shared()
        gl.thread_barrier()
    zero = gl.zeros([C, C], gl.float32, MMA)
    dA = warpgroup_mma(sdo, su, zero, use_acc=False, is_async=True)
    dB = warpgroup_mma(sdv, su, zero, use_acc=False, is_async=True)
    dA, dB = warpgroup_mma_wait(0, deps=[dA, dB])
    oo = warpgroup_mma(sdo, so.permute((1, 0)), zero, use_acc=False, is_async=True)
    xv = warpgroup_mma(sdv, sv.permute((1, 0)), zero, use_acc=False, is_async=True)
    dd = on_diagonal(dA, i, j) * beta
    xu = on_diagonal(dB, i, j)
    sA.store(bf16(gl.where(i > j, dA, 0.0)))
    sB.store(bf16(gl.where(i > j, 0.0 - dB, 0.0)))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(pairs, [2 * b * C, 0], sA)
    tma.async_copy_shared_to_global(pairs, [(2 * b + 1) * C, 0], sB)
    oo, xv = warpgroup_mma_wait(0, deps=[oo, xv])
    ps = sums + b.to(gl.int64) * (4 * C) + r
    gl.store(ps, dd)
    gl.store(ps + C, on_diagonal(oo, i, j))
    gl.store(ps + 2 * C, 2.0 * xu - on_diagonal(xv, i, j))
    gl.store(ps + 3 * C, beta)
    pb = (first.to(gl.int64) + r) * H + i_h
    gl.store(db + pb, (xu * (1.0 - beta)).to(db.dtype.element_ty), mask=r < left)
    tma.store_wait(0)
    dismiss(rings, 1)
    dismiss((ru,), 1)
