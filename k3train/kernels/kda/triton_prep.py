"""Operands of every chunk of 64 tokens: scaled q, k and beta k, and causal scores with beta of their columns.

A chunk is two blocks of 32 tokens. Every decay within a block is a product of two factors around a fixed
anchor, half of the largest decay over a block below its start: x up to a token and y = 1 / x from it. Both
fit fp32 and bf16 whatever later tokens hold. Decays from the block's start and to its end are x and y times
a constant, products across the two blocks go through their border. Everything before the scores is laid out
[channels, tokens], so that sums over positions are products with a 0/1 triangle. A query's score with its own
key has no decay in it: where these are most of the output, they would be the largest error, so they are
summed up in fp32 from the inputs themselves.

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

from k3train.kernels.kda.triton_math import (
    bf16,
    clear_rows,
    ex2,
    fp16,
    log2_gates,
    of_tokens,
    product,
    sigmoid,
    store_triangle,
    wide,
)
from k3train.kernels.kda.triton_ring import arrived, dismiss, expect_all, fetch, ring


@gluon.jit
def channels(s, half: gl.constexpr, MMA: gl.constexpr):
    """A block's rows of tokens in shared memory -> [channels, tokens]."""
    return s.slice(32 * half, 32, 0).permute((1, 0)).load(MMA)


@gluon.jit
def stage(s, first: gl.constexpr, x):
    """[channels, 32 tokens] -> bf16 rows of tokens in shared memory."""
    s.slice(first, 32, 0).permute((1, 0)).store(bf16(x))


@gluon.jit
def inverse_norm(x):
    """1 / |row|."""
    return gl.rsqrt(gl.sum(x * x, 1) + 1e-6)


@gluon.jit
def score(sx, sy, SC: gl.constexpr):
    acc = gl.zeros([64, 32], gl.float32, SC)
    return warpgroup_mma(sx, sy.permute((1, 0)), acc, use_acc=False, is_async=True)


@gluon.jit
def scores_of(sx, sy, Q, K, y, SC: gl.constexpr):
    """Start the scores of a block's queries and keys with y, all [channels, tokens]."""
    stage(sx, 0, Q)
    stage(sx, 32, K)
    stage(sy, 0, y)
    fence_async_shared()
    gl.thread_barrier()
    return score(sx, sy, SC)


@gluon.jit
def put_score(aqk, akk, x, row: gl.constexpr, col: gl.constexpr, SC: gl.constexpr):
    """Rows 0-31 are a block's queries, rows 32-63 its keys."""
    r = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, SC)), 1)
    j = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, SC)), 0)
    gl.store(aqk + (row + r) * 64 + (col + j), bf16(x), mask=(r < 32) & (j < 32))
    gl.store(akk + (row + r - 32) * 64 + (col + j), fp16(x), mask=(r >= 32) & (j < 32))


@gluon.jit
def causal(acc, own, SC: gl.constexpr):
    """A block's scores with its own tokens, those of queries with their own keys replaced by ``own`` [32]."""
    r = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, SC)), 1)
    j = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, SC)), 0)
    acc = gl.where(r == j, gl.expand_dims(own.load(gl.SliceLayout(0, SC)), 0), acc)
    return gl.where((r >= j) & ((r < 32) | (r - 32 > j)), acc, 0.0)


@gluon.jit
def kda_prep(
    q,
    k,
    z,
    beta,
    A_log,
    bias,
    kh,
    kt,
    qh,
    akk,
    aqk,
    dec,
    rs,
    chunks,
    scale,
    lb,
    shift,
    down,
    H: gl.constexpr,
    D: gl.constexpr,
    BD: gl.constexpr,
    SCORES: gl.constexpr,
):
    """Write kh, kt, qh of a chunk; with SCORES dec, aqk, akk and rs too: inverse norms of q and k, beta."""
    C: gl.constexpr = 64
    W: gl.constexpr = BD // 16
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, 32, 16])
    DOT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    SC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 16, 16])
    LN: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BD, BD // 8], [W, 1], [1, 0])
    LT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [W, 1], [1, 0])
    L1: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    S64: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    CH: gl.constexpr = gl.SliceLayout(1, MMA)
    TK: gl.constexpr = gl.SliceLayout(0, MMA)
    d0 = gl.program_id(0) % (D // BD) * BD
    b = gl.program_id(0) // (D // BD)
    i_h = b % H
    i_c = b // H
    first = gl.load(chunks + 2 * i_c)
    left = gl.load(chunks + 2 * i_c + 1)
    inputs = (z, k, q)
    rings = (ring(z, 1), ring(k, 1), ring(q, 1))
    expect_all(inputs, rings, 0, True)
    for n in gl.static_range(3):
        fetch(inputs[n], first, i_h * D + d0, rings[n], 0, True)
    a = gl.exp(gl.load(A_log + i_h).to(gl.float32))
    ch = d0 + gl.arange(0, BD, CH)
    tok = gl.arange(0, 32, TK)
    b_bias = gl.load(bias + i_h * D + ch).to(gl.float32)
    tri = gl.allocate_shared_memory(gl.float16, [32, 32], S64)
    store_triangle(tri, LT)
    # by token: inverse norms of q and k, beta, the score of a query with its own key
    sr = gl.allocate_shared_memory(gl.float32, [4 * C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    prs = rs + b.to(gl.int64) * (3 * C)
    if SCORES:
        rn = gl.arange(0, C, gl.SliceLayout(1, LN))
        logit = gl.load(beta + (first.to(gl.int64) + rn) * H + i_h, mask=rn < left, other=0.0)
        sx0 = gl.allocate_shared_memory(gl.bfloat16, [64, D], z.layout)
        sx1 = gl.allocate_shared_memory(gl.bfloat16, [64, D], z.layout)
        sy0 = gl.allocate_shared_memory(gl.bfloat16, [32, D], z.layout)
        sy1 = gl.allocate_shared_memory(gl.bfloat16, [32, D], z.layout)
    else:
        sr.slice(0, 2 * C).store(gl.load(prs + gl.arange(0, 2 * C, L1)))
        sr.slice(2 * C, C).store(gl.load(prs + 2 * C + gl.arange(0, C, L1)))
    zero = gl.zeros([BD, 32], gl.float32, MMA)
    fence_async_shared()
    gl.thread_barrier()
    sz = arrived(rings[0], 0, 1)
    sk = arrived(rings[1], 0, 1)
    sq = arrived(rings[2], 0, 1)
    if left < C:
        clear_rows(sk, left, LN)
        clear_rows(sq, left, LN)
        gl.thread_barrier()
    if SCORES:
        rate = sigmoid(logit.to(gl.float32))
        xq = wide(sq.load(LN))
        xk = wide(sk.load(LN))
        rq = inverse_norm(xq)
        rk = inverse_norm(xk)
        gl.store(prs + rn, rq)
        gl.store(prs + C + rn, rk)
        gl.store(prs + 2 * C + rn, rate)
        sr.slice(0, C).store(rq)
        sr.slice(C, C).store(rk)
        sr.slice(2 * C, C).store(rate)
        sr.slice(3 * C, C).store(gl.sum(xq * xk, 1) * (rq * scale) * (rk * rate))
    z0 = channels(sz, 0, MMA)
    m0 = tok < left
    ga0, e0 = log2_gates(wide(z0), m0, a, b_bias, lb, DOT)
    z1 = channels(sz, 1, MMA)
    m1 = tok + 32 < left
    ga1, e1 = log2_gates(wide(z1), m1, a, b_bias, lb, DOT)
    to_end0 = gl.expand_dims(ex2(e0 + shift), 1)
    to_end1 = gl.expand_dims(ex2(e1 + shift), 1)
    if SCORES:
        gl.store(dec + b.to(gl.int64) * D + ch, ex2(e0 + e1))
    e0 = gl.expand_dims(ex2(e0), 1)
    e1 = gl.expand_dims(ex2(e1), 1)
    gl.thread_barrier()
    xk1 = channels(sk, 1, MMA)
    xq1 = channels(sq, 1, MMA)
    # block 0
    K = wide(channels(sk, 0, MMA)) * gl.expand_dims(of_tokens(sr, 1, 0, TK), 0)
    Q = wide(channels(sq, 0, MMA)) * gl.expand_dims(of_tokens(sr, 0, 0, TK) * scale, 0)
    A = product(ga0, tri, zero, False) + shift
    x = ex2(A)
    Q = Q * x
    yo = K * (gl.expand_dims(of_tokens(sr, 2, 0, TK), 0) * ex2(0.0 - A))
    K = K * x
    if SCORES:
        s0 = scores_of(sx0, sy0, Q, K, yo, SC)
    yo = yo * to_end0
    stage(sz, 0, K * down)
    stage(sq, 0, Q * down)
    stage(sk, 0, yo * e1)
    # block 1, whose pairs with block 0 share its left operand
    K = wide(xk1) * gl.expand_dims(of_tokens(sr, 1, 1, TK), 0)
    Q = wide(xq1) * gl.expand_dims(of_tokens(sr, 0, 1, TK) * scale, 0)
    A = product(ga1, tri, zero, False) + shift
    if SCORES:
        s0 = warpgroup_mma_wait(0, deps=[s0])
    x = ex2(A)
    Q = Q * x
    y = K * (gl.expand_dims(of_tokens(sr, 2, 1, TK), 0) * ex2(0.0 - A))
    K = K * x
    if SCORES:
        stage(sy0, 0, yo * down)
        s1 = scores_of(sx1, sy1, Q, K, y, SC)
        s2 = score(sx1, sy0, SC)
    x = e0 * down
    stage(sz, 32, K * x)
    stage(sq, 32, Q * x)
    stage(sk, 32, y * to_end1)
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(kh, [b * C, d0], sz)
    tma.async_copy_shared_to_global(qh, [b * C, d0], sq)
    tma.async_copy_shared_to_global(kt, [b * C, d0], sk)
    if SCORES:
        aqk += b.to(gl.int64) * (C * C)
        akk += b.to(gl.int64) * (C * C)
        put_score(aqk, akk, causal(s0, sr.slice(3 * C, 32), SC), 0, 0, SC)
        put_score(aqk, akk, gl.zeros([64, 32], gl.float32, SC), 0, 32, SC)
        s1, s2 = warpgroup_mma_wait(0, deps=[s1, s2])
        put_score(aqk, akk, causal(s1, sr.slice(3 * C + 32, 32), SC), 32, 32, SC)
        put_score(aqk, akk, s2, 32, 0, SC)
    tma.store_wait(0)
    dismiss(rings, 1)
