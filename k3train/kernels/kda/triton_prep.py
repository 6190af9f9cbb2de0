"""Operands of every chunk of 64 tokens: scaled q and k, causal scores and their inverse.

A chunk is two blocks of 32 tokens. Every decay within a block is a product of two factors around a fixed
anchor, half of the largest decay over a block below its start: x up to a token and y = 1 / x from it. Both
fit fp32 and bf16 whatever later tokens hold. Decays from the block's start and to its end are x and y times
a constant, products across the two blocks go through their border. Everything before the scores is laid out
[channels, tokens], so that sums over positions are products with a 0/1 triangle.

Imports triton: import it inside functions only.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
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
    product,
    sigmoid,
    store_triangle,
)


@gluon.jit
def channels(s, half: gl.constexpr, MMA: gl.constexpr):
    """A block's rows of tokens in shared memory -> [channels, tokens]."""
    return s.slice(32 * half, 32, 0).permute((1, 0)).load(MMA)


@gluon.jit
def stage(s, first: gl.constexpr, x):
    """[channels, 32 tokens] -> bf16 rows of tokens in shared memory."""
    s.slice(first, 32, 0).permute((1, 0)).store(bf16(x))


@gluon.jit
def inverse_norms(s, LN: gl.constexpr):
    """1 / |row| of 64 rows."""
    x = s.load(LN).to(gl.float32)
    return gl.rsqrt(gl.sum(x * x, 1) + 1e-6)


@gluon.jit
def score(sx, sy, SC: gl.constexpr):
    acc = gl.zeros([64, 32], gl.float32, SC)
    return warpgroup_mma(sx, sy.permute((1, 0)), acc, use_acc=False, is_async=True)


@gluon.jit
def put_score(aqk, akk, acc, row: gl.constexpr, col: gl.constexpr, diag: gl.constexpr, SC: gl.constexpr):
    """Rows 0-31 are a block's queries, rows 32-63 its keys."""
    r = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, SC)), 1)
    j = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, SC)), 0)
    keep = (r >= j) & ((r < 32) | (r - 32 > j)) if diag else r >= 0
    x = gl.where(keep, acc, 0.0)
    gl.store(aqk + (row + r) * 64 + (col + j), bf16(x), mask=(r < 32) & (j < 32))
    gl.store(akk + (row + r - 32) * 64 + (col + j), fp16(x), mask=(r >= 32) & (j < 32))


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
):
    C: gl.constexpr = 64
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 32, 16])
    DOT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    SC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 16, 16])
    LN: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    LT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [8, 1], [1, 0])
    S64: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    CH: gl.constexpr = gl.SliceLayout(1, MMA)
    TK: gl.constexpr = gl.SliceLayout(0, MMA)
    i_h = gl.program_id(0) % H
    i_c = gl.program_id(0) // H
    first = gl.load(chunks + 2 * i_c)
    left = gl.load(chunks + 2 * i_c + 1)
    b = i_c * H + i_h
    sz = gl.allocate_shared_memory(gl.bfloat16, [C, D], z.layout)
    sk = gl.allocate_shared_memory(gl.bfloat16, [C, D], z.layout)
    sq = gl.allocate_shared_memory(gl.bfloat16, [C, D], z.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, 3 * 2 * C * D)
    tma.async_copy_global_to_shared(z, [first, i_h * D], bar, sz)
    tma.async_copy_global_to_shared(k, [first, i_h * D], bar, sk)
    tma.async_copy_global_to_shared(q, [first, i_h * D], bar, sq)
    a = gl.exp(gl.load(A_log + i_h).to(gl.float32))
    ch = gl.arange(0, D, CH)
    tok = gl.arange(0, 32, TK)
    b_bias = gl.load(bias + i_h * D + ch).to(gl.float32)
    tri = gl.allocate_shared_memory(gl.float16, [32, 32], S64)
    store_triangle(tri, LT)
    sr = gl.allocate_shared_memory(gl.float32, [2 * C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    sx = gl.allocate_shared_memory(gl.bfloat16, [2, 64, D], z.layout)
    sy = gl.allocate_shared_memory(gl.bfloat16, [2, 32, D], z.layout)
    zero = gl.zeros([D, 32], gl.float32, MMA)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.wait(bar, 0)
    if left < C:
        clear_rows(sk, left, LN)
        clear_rows(sq, left, LN)
        gl.thread_barrier()
    rn = gl.arange(0, C, gl.SliceLayout(1, LN))
    rq = inverse_norms(sq, LN)
    rk = inverse_norms(sk, LN)
    prs = rs + b.to(gl.int64) * (2 * C)
    gl.store(prs + rn, rq)
    gl.store(prs + C + rn, rk)
    sr.slice(0, C).store(rq)
    sr.slice(C, C).store(rk)
    ga0, e0 = log2_gates(channels(sz, 0, MMA), tok < left, a, b_bias, lb, DOT)
    ga1, e1 = log2_gates(channels(sz, 1, MMA), tok + 32 < left, a, b_bias, lb, DOT)
    to_end0 = gl.expand_dims(ex2(e0 + shift), 1)
    to_end1 = gl.expand_dims(ex2(e1 + shift), 1)
    gl.store(dec + b.to(gl.int64) * D + ch, ex2(e0 + e1))
    e0 = gl.expand_dims(ex2(e0), 1)
    e1 = gl.expand_dims(ex2(e1), 1)
    gl.thread_barrier()
    rq0 = sr.slice(0, 32).load(TK) * scale
    rq1 = sr.slice(32, 32).load(TK) * scale
    rk0 = sr.slice(64, 32).load(TK)
    rk1 = sr.slice(96, 32).load(TK)
    xk1 = channels(sk, 1, MMA)
    xq1 = channels(sq, 1, MMA)
    # block 0
    K = channels(sk, 0, MMA).to(gl.float32) * gl.expand_dims(rk0, 0)
    Q = channels(sq, 0, MMA).to(gl.float32) * gl.expand_dims(rq0, 0)
    A = product(ga0, tri, zero, False) + shift
    x = ex2(A)
    Q = Q * x
    yo = K * ex2(0.0 - A)
    K = K * x
    stage(sx.index(0), 0, Q)
    stage(sx.index(0), 32, K)
    stage(sy.index(0), 0, yo)
    fence_async_shared()
    gl.thread_barrier()
    s0 = score(sx.index(0), sy.index(0), SC)
    yo = yo * to_end0
    stage(sz, 0, K * down)
    stage(sq, 0, Q * down)
    stage(sk, 0, yo * e1)
    # block 1, whose pairs with block 0 share its left operand
    K = xk1.to(gl.float32) * gl.expand_dims(rk1, 0)
    Q = xq1.to(gl.float32) * gl.expand_dims(rq1, 0)
    A = product(ga1, tri, zero, False) + shift
    s0 = warpgroup_mma_wait(0, deps=[s0])
    x = ex2(A)
    Q = Q * x
    y = K * ex2(0.0 - A)
    K = K * x
    stage(sx.index(1), 0, Q)
    stage(sx.index(1), 32, K)
    stage(sy.index(1), 0, y)
    stage(sy.index(0), 0, yo * down)
    fence_async_shared()
    gl.thread_barrier()
    s1 = score(sx.index(1), sy.index(1), SC)
    s2 = score(sx.index(1), sy.index(0), SC)
    x = e0 * down
    stage(sz, 32, K * x)
    stage(sq, 32, Q * x)
    stage(sk, 32, y * to_end1)
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(kh, [b * C, 0], sz)
    tma.async_copy_shared_to_global(qh, [b * C, 0], sq)
    tma.async_copy_shared_to_global(kt, [b * C, 0], sk)
    aqk += b.to(gl.int64) * (C * C)
    akk += b.to(gl.int64) * (C * C)
    put_score(aqk, akk, s0, 0, 0, True, SC)
    put_score(aqk, akk, gl.zeros([64, 32], gl.float32, SC), 0, 32, False, SC)
    s1, s2 = warpgroup_mma_wait(0, deps=[s1, s2])
    put_score(aqk, akk, s1, 32, 32, True, SC)
    put_score(aqk, akk, s2, 32, 0, False, SC)
    tma.store_wait(0)
    mbarrier.invalidate(bar)


@gluon.jit
def kda_inverse(akk, tb, beta, chunks, H: gl.constexpr):
    """(I + diag(beta) A)^-1 diag(beta) of strictly lower A [64, 64]; ``tb`` may overwrite ``akk``.

    Blocks of 16 by products of (I + N^(2^i)), N = -beta A; with their inverse D and M = D (N outside of the
    blocks) the whole is (I + M^2) (I + M) D. fp16 operands: A is at most 1, and doubling over blocks of 32
    would lose the digits that blocks of 16 keep.
    """
    C: gl.constexpr = 64
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    DOT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    L1: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i_h = gl.program_id(0) % H
    i_c = gl.program_id(0) // H
    row = (i_c * H + i_h) * C
    s = gl.allocate_shared_memory(gl.float16, [4, C, C], akk.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, 2 * C * C)
    tma.async_copy_global_to_shared(akk, [row, 0], bar, s.index(3))
    first = gl.load(chunks + 2 * i_c).to(gl.int64)
    left = gl.load(chunks + 2 * i_c + 1)
    t = gl.arange(0, C, L1)
    i = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(1, MMA)), 1)
    j = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(0, MMA)), 0)
    b = gl.load(beta + (first + t) * H + i_h, mask=t < left, other=0.0).to(gl.float32)
    b = gl.where(t < left, sigmoid(b), 0.0)
    rows = gl.expand_dims(gl.convert_layout(b, gl.SliceLayout(1, MMA)), 1)
    gl.thread_barrier()
    mbarrier.wait(bar, 0)
    N = s.index(3).load(MMA) * (0.0 - rows).to(gl.float16)
    none = gl.zeros_like(N)
    near = (i // 16) == (j // 16)
    P = gl.where(near, N, none)
    s.index(2).store(gl.where(near, none, N))
    X = gl.where(i == j, 1.0, P.to(gl.float32))
    zero = gl.zeros([C, C], gl.float32, MMA)
    for n in gl.static_range(4):
        s.index(n % 2).store(P)
        fence_async_shared()
        gl.thread_barrier()
        pa = gl.convert_layout(P, DOT)
        xa = gl.convert_layout(fp16(X), DOT)
        if n == 0:
            P2 = product(pa, s.index(0), zero, False)
        elif n == 3:
            X = product(xa, s.index(1), X, True)
        else:
            P2 = warpgroup_mma(pa, s.index(n % 2), zero, use_acc=False, is_async=True)
            X = warpgroup_mma(xa, s.index(n % 2), X, is_async=True)
            P2, X, pa, xa = warpgroup_mma_wait(0, deps=[P2, X, pa, xa])
        P = fp16(P2)
    x = fp16(X)
    s.index(0).store(x)
    m = fp16(product(gl.convert_layout(x, DOT), s.index(2), zero, False))
    s.index(3).store(m)
    fence_async_shared()
    gl.thread_barrier()
    ma = gl.convert_layout(m, DOT)
    X = warpgroup_mma(ma, s.index(0), X, is_async=True)
    M2 = warpgroup_mma(ma, s.index(3), zero, use_acc=False, is_async=True)
    X, M2, ma = warpgroup_mma_wait(0, deps=[X, M2, ma])
    s.index(1).store(fp16(X))
    fence_async_shared()
    gl.thread_barrier()
    X = product(gl.convert_layout(fp16(M2), DOT), s.index(1), X, True)
    cols = gl.expand_dims(gl.convert_layout(b, gl.SliceLayout(0, MMA)), 0)
    out = gl.allocate_shared_memory(gl.bfloat16, [C, C], tb.layout)
    out.store(bf16(X * cols))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(tb, [row, 0], out)
    tma.store_wait(0)
    mbarrier.invalidate(bar)
