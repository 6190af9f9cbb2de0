"""Operands of every chunk of 64 tokens: scaled q and k, causal scores and their inverse.

A chunk is two blocks of 32 tokens. Products of two decays within a block go through a fixed anchor, the
block's first gate less half of the largest decay over a block, so that both factors fit fp32 and bf16
whatever later tokens hold; products across the two blocks go through their border, where both factors are
at most 1. Everything before the scores is laid out [channels, tokens], so that sums over positions are
products with 0/1 triangles.

Imports triton: import it inside functions only.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from k3train.kernels.kda.triton_math import ex2, log2_gates, product, put, store_triangles, to_channels


@gluon.jit
def stage(s, x):
    s.permute((1, 0)).store(x.to(gl.bfloat16))


@gluon.jit
def score(sx, sy, SC: gl.constexpr):
    acc = gl.zeros([64, 32], gl.float32, SC)
    return warpgroup_mma(sx, sy.permute((1, 0)), acc, use_acc=False, is_async=True)


@gluon.jit
def put_score(aqk, akk, acc, row: gl.constexpr, col: gl.constexpr, diag: gl.constexpr, SC: gl.constexpr):
    r = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, SC)), 1)
    j = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, SC)), 0)
    keep = (r >= j) & ((r < 32) | (r - 32 > j)) if diag else r >= 0
    x = gl.where(keep, acc, 0.0)
    gl.store(aqk + (row + r) * 64 + (col + j), x.to(gl.bfloat16), mask=(r < 32) & (j < 32))
    gl.store(akk + (row + r - 32) * 64 + (col + j), x.to(gl.float16), mask=(r >= 32) & (j < 32))


@gluon.jit
def kda_prep(
    q,
    k,
    z,
    A_log,
    bias,
    kh,
    kt,
    qh,
    tb,
    aqk,
    dec,
    rs,
    chunks,
    scale,
    lb,
    shift,
    H: gl.constexpr,
    D: gl.constexpr,
):
    C: gl.constexpr = 64
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 32, 16])
    DOT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    SC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 16, 16])
    LD: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    LT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [8, 1], [1, 0])
    S128: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    S64: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    CH: gl.constexpr = gl.SliceLayout(1, MMA)
    TK: gl.constexpr = gl.SliceLayout(0, MMA)
    i_h = gl.program_id(0) % H
    i_c = (gl.program_id(0) // H).to(gl.int64)
    first = gl.load(chunks + 2 * i_c).to(gl.int64)
    left = gl.load(chunks + 2 * i_c + 1)
    b = i_c * H + i_h
    row0 = first * H + i_h
    rl = gl.arange(0, 32, gl.SliceLayout(1, LD))
    cl = gl.arange(0, D, gl.SliceLayout(0, LD))
    p0 = row0 * D + (gl.expand_dims(rl * (H * D), 1) + gl.expand_dims(cl, 0))
    p1 = p0 + 32 * H * D
    ml0 = gl.expand_dims(rl < left, 1)
    ml1 = gl.expand_dims(rl + 32 < left, 1)
    xz0 = gl.load(z + p0, mask=ml0, other=0.0)
    xz1 = gl.load(z + p1, mask=ml1, other=0.0)
    xk0 = gl.load(k + p0, mask=ml0, other=0.0)
    xk1 = gl.load(k + p1, mask=ml1, other=0.0)
    xq0 = gl.load(q + p0, mask=ml0, other=0.0)
    xq1 = gl.load(q + p1, mask=ml1, other=0.0)
    a = gl.exp(gl.load(A_log + i_h).to(gl.float32))
    ch = gl.arange(0, D, CH)
    tok = gl.arange(0, 32, TK)
    b_bias = gl.load(bias + i_h * D + ch).to(gl.float32)
    m0 = tok < left
    m1 = tok + 32 < left
    tri = gl.allocate_shared_memory(gl.float16, [3, 32, 32], S64)
    store_triangles(tri, LT)
    fence_async_shared()
    gl.thread_barrier()
    ga0, e0 = log2_gates(to_channels(xz0, MMA), m0, a, b_bias, lb, DOT)
    ga1, e1 = log2_gates(to_channels(xz1, MMA), m1, a, b_bias, lb, DOT)
    gl.store(dec + b * D + ch, e0 * e1)
    prs = rs + b * (2 * C) + rl
    f = xk0.to(gl.float32)
    rk0 = gl.rsqrt(gl.sum(f * f, 1) + 1e-6)
    gl.store(prs + 64, rk0)
    f = xk1.to(gl.float32)
    rk1 = gl.rsqrt(gl.sum(f * f, 1) + 1e-6)
    gl.store(prs + 96, rk1)
    f = xq0.to(gl.float32)
    rq0 = gl.rsqrt(gl.sum(f * f, 1) + 1e-6)
    gl.store(prs, rq0)
    f = xq1.to(gl.float32)
    rq1 = gl.rsqrt(gl.sum(f * f, 1) + 1e-6)
    gl.store(prs + 32, rq1)
    sx = gl.allocate_shared_memory(gl.bfloat16, [3, 64, D], S128)
    sy = gl.allocate_shared_memory(gl.bfloat16, [3, 32, D], S128)
    pt = b * (C * D) + gl.expand_dims(rl * D, 1) + gl.expand_dims(cl, 0)
    zero = gl.zeros([D, 32], gl.float32, MMA)
    # block 0
    K = to_channels(xk0, MMA).to(gl.float32) * gl.expand_dims(gl.convert_layout(rk0, TK), 0)
    Q = to_channels(xq0, MMA).to(gl.float32) * gl.expand_dims(gl.convert_layout(rq0, TK) * scale, 0)
    A = product(ga0, tri.index(2), zero, False) + shift
    x = ex2(A)
    stage(sx.index(0).slice(0, 32, 0), Q * x)
    stage(sx.index(0).slice(32, 32, 0), K * x)
    stage(sy.index(0), K * ex2(0.0 - A))
    x = ex2(product(ga0, tri.index(0), zero, False))
    put(kh + pt, K * x, None, LD)
    put(qh + pt, Q * x, None, LD)
    x = K * ex2(product(ga0, tri.index(1), zero, False))
    stage(sy.index(2), x)
    put(kt + pt, x * gl.expand_dims(e1, 1), None, LD)
    # block 1
    pt += 32 * D
    K = to_channels(xk1, MMA).to(gl.float32) * gl.expand_dims(gl.convert_layout(rk1, TK), 0)
    Q = to_channels(xq1, MMA).to(gl.float32) * gl.expand_dims(gl.convert_layout(rq1, TK) * scale, 0)
    A = product(ga1, tri.index(2), zero, False) + shift
    x = ex2(A)
    stage(sx.index(1).slice(0, 32, 0), Q * x)
    stage(sx.index(1).slice(32, 32, 0), K * x)
    stage(sy.index(1), K * ex2(0.0 - A))
    x = ex2(product(ga1, tri.index(0), zero, False))
    stage(sx.index(2).slice(0, 32, 0), Q * x)
    stage(sx.index(2).slice(32, 32, 0), K * x)
    fence_async_shared()
    gl.thread_barrier()
    s0 = score(sx.index(0), sy.index(0), SC)
    s1 = score(sx.index(1), sy.index(1), SC)
    s2 = score(sx.index(2), sy.index(2), SC)
    x = x * gl.expand_dims(e0, 1)
    put(kh + pt, K * x, None, LD)
    put(qh + pt, Q * x, None, LD)
    s0, s1, s2 = warpgroup_mma_wait(0, deps=[s0, s1, s2])
    put_score(aqk + b * (C * C), tb + b * (C * C), s0, 0, 0, True, SC)
    put_score(aqk + b * (C * C), tb + b * (C * C), s1, 32, 32, True, SC)
    put_score(aqk + b * (C * C), tb + b * (C * C), s2, 32, 0, False, SC)
    put_score(aqk + b * (C * C), tb + b * (C * C), gl.zeros([64, 32], gl.float32, SC), 0, 32, False, SC)
    put(kt + pt, K * ex2(product(ga1, tri.index(1), zero, False)), None, LD)


@triton.jit
def kda_inverse(akk, tb, beta, chunks, H: tl.constexpr, DT: tl.constexpr, IT: tl.constexpr):
    C: tl.constexpr = 64
    i_h = tl.program_id(0) % H
    i_c = (tl.program_id(0) // H).to(tl.int64)
    first = tl.load(chunks + 2 * i_c).to(tl.int64)
    left = tl.load(chunks + 2 * i_c + 1)
    r = tl.arange(0, C)
    i, j = r[:, None], r[None, :]
    m = r < left
    b = tl.where(m, tl.sigmoid(tl.load(beta + (first + r) * H + i_h, mask=m, other=0.0).to(tl.float32)), 0.0)
    p = (i_c * H + i_h) * (C * C) + i * C + j
    A = tl.load(akk + p).to(tl.float32) * b[:, None]
    N = tl.where((i // 16) == (j // 16), -A, 0.0)
    X = tl.where(i == j, 1.0, 0.0) + N
    P = N.to(IT)
    for _ in tl.static_range(3):
        P = tl.dot(P, P).to(IT)
        X = X + tl.dot(X.to(IT), P)
    O = tl.where(((i // 32) == (j // 32)) & ((i // 16) != (j // 16)), A, 0.0).to(IT)
    Y = X.to(IT)
    X = X - tl.dot(tl.dot(Y, O).to(IT), Y)
    O = tl.where((i // 32) != (j // 32), A, 0.0).to(IT)
    Y = X.to(IT)
    X = X - tl.dot(tl.dot(Y, O).to(IT), Y)
    tl.store(tb + p, (X * b[None, :]).to(DT))
