"""Gradients of a chunk's inputs from the states, their gradients and the chunk's own pairs of tokens.

``kda_grad`` works on blocks of 64 channels, laid out [channels, tokens], with the results of ``kda_pairs``.

The gate's gradient is a sum over positions of terms that enter at one token and leave at another. Each term
is formed twice, once per end, from the same rounded operands; so the ends cancel as in exact arithmetic and
bf16 operands are enough. The i = j terms do not depend on the gate and stay out of the products.

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
    log2_gates,
    of_tokens,
    product,
    put,
    sigmoid,
    store_triangle,
    to_channels,
)


@gluon.jit
def normed(x, r):
    return x.to(gl.float32) * gl.expand_dims(r, 0)


@gluon.jit
def tile(st, n: gl.constexpr):
    return st.index(n)


@gluon.jit
def transposed(st, n: gl.constexpr):
    return st.index(n).permute((1, 0))


@gluon.jit
def tokens(s, block: gl.constexpr):
    return s.slice(32 * block, 32, 0).permute((1, 0))


@gluon.jit
def row_products(ga, tri, sS, sdo, sx, block: gl.constexpr, zero, shift):
    """Decay up to a token around the block's anchor (log2), S dO^T and S dV^T [channels, 32 tokens]."""
    A = warpgroup_mma(ga, tri, zero, use_acc=False, is_async=True)
    tq = warpgroup_mma(sS, tokens(sdo, block), zero, use_acc=False, is_async=True)
    tk = warpgroup_mma(sS, tokens(sx, block), zero, use_acc=False, is_async=True)
    A, tq, tk, ga = warpgroup_mma_wait(0, deps=[A, tq, tk, ga])
    return A + shift, tq, tk


@gluon.jit
def column_product(sD, su, block: gl.constexpr, zero):
    """dS W^T [channels, 32 tokens]."""
    tc = warpgroup_mma(sD, tokens(su, block), zero, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[tc])


@gluon.jit
def pair(a, b, x, y, s, t, use_acc: gl.constexpr):
    """s + a x and t + b y, left operands in registers."""
    s = warpgroup_mma(a, x, s, use_acc=use_acc, is_async=True)
    t = warpgroup_mma(b, y, t, use_acc=use_acc, is_async=True)
    s, t, a, b = warpgroup_mma_wait(0, deps=[s, t, a, b])
    return s, t


@gluon.jit
def chained(a, b, x, y, t, use_acc: gl.constexpr):
    """t + a x + b y, left operands in registers."""
    t = warpgroup_mma(a, x, t, use_acc=use_acc, is_async=True)
    t = warpgroup_mma(b, y, t, is_async=True)
    t, a, b = warpgroup_mma_wait(0, deps=[t, a, b])
    return t


@gluon.jit
def diagonal(q, k, xe, ye, st, block: gl.constexpr, dq, dk, dG, zero, DOT: gl.constexpr):
    """Adds one 32-token diagonal tile to dq, dk and the gate's gradient.

    The rounded operands of one product multiply the result of the other one, so that a pair of tokens adds
    the same number to the gate's gradient where it enters and where it leaves the sum over positions.
    """
    y = bf16(k * ye)
    ya = gl.convert_layout(y, DOT)
    tq, tk = pair(ya, ya, transposed(st, block), transposed(st, 3 + block), zero, zero, False)
    qx = bf16(q * xe)
    kx = bf16(k * xe)
    dq += tq * xe
    dk += tk * xe
    dG += qx.to(gl.float32) * tq + kx.to(gl.float32) * tk
    qa = gl.convert_layout(qx, DOT)
    ka = gl.convert_layout(kx, DOT)
    tc = chained(qa, ka, tile(st, block), tile(st, 3 + block), zero, False)
    dk += tc * ye
    dG -= y.to(gl.float32) * tc
    return dq, dk, dG


@gluon.jit
def in_two(x):
    """bf16 parts of x."""
    h = bf16(x)
    return h, bf16(x - h.to(gl.float32))


@gluon.jit
def aside(s, part: gl.constexpr):
    """Room for a part [64 channels, 32 tokens] in a tile whose second block has been used."""
    return s.slice(32, 32, 0).slice(64 * part, 64, 1).permute((1, 0))


@gluon.jit
def suffix(h, l, tri, zero, DOT: gl.constexpr):
    """Sum of h + l over this and later positions of the block."""
    return chained(gl.convert_layout(h, DOT), gl.convert_layout(l, DOT), tri, tri, zero, False)


@gluon.jit
def put_inputs(
    dq, dk, p, dq_, dk_, q, k, sr, ss, block: gl.constexpr, scale, mask, LD: gl.constexpr, TK: gl.constexpr
):
    """Back through scale and l2 norms; the i = j term of the scores joins here."""
    dd = gl.expand_dims(of_tokens(ss, 0, block, TK), 0)
    sq = gl.expand_dims(of_tokens(ss, 1, block, TK) / scale, 0)
    sk = gl.expand_dims(of_tokens(ss, 2, block, TK), 0)
    rq = of_tokens(sr, 0, block, TK)
    rk = of_tokens(sr, 1, block, TK)
    q = normed(q, rq * scale)
    k = normed(k, rk)
    put(dq + p, gl.expand_dims(rq, 0) * ((dq_ + dd * k) * scale - q * sq), mask, LD)
    put(dk + p, gl.expand_dims(rk, 0) * (dk_ + dd * q - k * sk), mask, LD)


@gluon.jit
def put_gate(dz, x, p, R, tok_mask, mask, a, bias, lb, LD: gl.constexpr):
    """Back through the bounded sigmoid -> the sums over tokens of dz (z + bias) and of dz."""
    inside = gl.expand_dims(tok_mask, 0)
    zb = gl.where(inside, x.to(gl.float32) + gl.expand_dims(bias, 1), 0.0)
    s = sigmoid(zb * a)
    R = gl.where(inside, R * (a * lb) * s * (1.0 - s), 0.0)
    put(dz + p, R, mask, LD)
    return gl.sum(R * zb, 1), gl.sum(R, 1)


@gluon.jit
def fetch_tile(hs, dhs, do, dv, us, pairs, bar, sS, sD, sdo, sx, su, st, first, b, i_h, i_d, V: gl.constexpr):
    """Start the copies of a tile's operands into shared memory."""
    C: gl.constexpr = 64
    mbarrier.expect(bar, 2 * (5 * C * V + 6 * 32 * 32))
    tma.async_copy_global_to_shared(hs, [b * V + i_d * C, 0], bar, sS)
    tma.async_copy_global_to_shared(dhs, [b * V + i_d * C, 0], bar, sD)
    tma.async_copy_global_to_shared(do, [first, i_h * V], bar, sdo)
    tma.async_copy_global_to_shared(dv, [first, i_h * V], bar, sx)
    for n in gl.static_range(2):
        row = (2 * b + n) * C
        tma.async_copy_global_to_shared(pairs, [row, 0], bar, st.index(3 * n))
        tma.async_copy_global_to_shared(pairs, [row + 32, 32], bar, st.index(3 * n + 1))
        tma.async_copy_global_to_shared(pairs, [row + 32, 0], bar, st.index(3 * n + 2))
    tma.async_copy_global_to_shared(us, [b * C, 0], bar, su)


@gluon.jit
def fetch_rows(x, p, left, block: gl.constexpr, LD: gl.constexpr):
    """A block's rows [32, 64], zero past the document's end."""
    inside = gl.arange(0, 32, gl.SliceLayout(1, LD)) + 32 * block < left
    return gl.load(x + p, mask=gl.expand_dims(inside, 1), other=0.0)


@gluon.jit
def kda_grad(
    q,
    k,
    z,
    A_log,
    bias,
    do,
    us,
    dv,
    hs,
    dhs,
    rs,
    pairs,
    sums,
    dq,
    dk,
    dz,
    dAp,
    dbp,
    chunks,
    scale,
    lb,
    shift,
    down,
    H: gl.constexpr,
    D: gl.constexpr,
    V: gl.constexpr,
):
    C: gl.constexpr = 64
    BD: gl.constexpr = 64
    ND: gl.constexpr = D // BD
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    MSQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    DOT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    LD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    LV: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    LT: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    L1: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    S1: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    CH: gl.constexpr = gl.SliceLayout(1, MMA)
    TK: gl.constexpr = gl.SliceLayout(0, MMA)
    sS = gl.allocate_shared_memory(gl.bfloat16, [BD, V], hs.layout)
    sD = gl.allocate_shared_memory(gl.bfloat16, [BD, V], hs.layout)
    sdo = gl.allocate_shared_memory(gl.bfloat16, [C, V], hs.layout)
    sx = gl.allocate_shared_memory(gl.bfloat16, [C, V], hs.layout)
    su = gl.allocate_shared_memory(gl.bfloat16, [C, V], hs.layout)
    st = gl.allocate_shared_memory(gl.bfloat16, [6, 32, 32], pairs.layout)
    sr = gl.allocate_shared_memory(gl.float32, [2 * C], S1)
    ss = gl.allocate_shared_memory(gl.float32, [4 * C], S1)
    sz = gl.allocate_shared_memory(gl.bfloat16, [C, BD], z.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    z_bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.init(z_bar, count=1)
    tri = gl.allocate_shared_memory(gl.float16, [32, 32], pairs.layout)
    store_triangle(tri, LT)
    suf = gl.allocate_shared_memory(gl.bfloat16, [32, 32], pairs.layout)
    i = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(1, LT)), 1)
    suf.store((i >= gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, LT)), 0)).to(gl.bfloat16))
    fence_async_shared()
    rl = gl.arange(0, 32, gl.SliceLayout(1, LD))
    cl = gl.arange(0, BD, gl.SliceLayout(0, LD))
    pl = gl.expand_dims(rl * (H * D), 1) + gl.expand_dims(cl, 0)
    ch = gl.arange(0, BD, CH)
    tok = gl.arange(0, 32, TK)
    t1 = gl.arange(0, 2 * C, L1)
    t2 = gl.arange(0, 4 * C, L1)
    rsq = gl.expand_dims(gl.arange(0, BD, gl.SliceLayout(1, MSQ)), 1)
    eye = rsq == gl.expand_dims(gl.arange(0, BD, gl.SliceLayout(0, MSQ)), 0)
    fence_async_shared()
    i_d = gl.program_id(0) % ND
    i_h = gl.program_id(0) // ND % H
    b = gl.program_id(0) // ND
    first = gl.load(chunks + 2 * (b // H))
    left = gl.load(chunks + 2 * (b // H) + 1)
    gl.thread_barrier()
    mbarrier.expect(z_bar, 2 * C * BD)
    tma.async_copy_global_to_shared(z, [first, i_h * D + i_d * BD], z_bar, sz)
    fetch_tile(hs, dhs, do, dv, us, pairs, bar, sS, sD, sdo, sx, su, st, first, b, i_h, i_d, V)
    base = (first.to(gl.int64) * H + i_h) * D + i_d * BD
    xk0 = fetch_rows(k + base, pl, left, 0, LD)
    xk1 = fetch_rows(k + base + 32 * H * D, pl, left, 1, LD)
    xq1 = fetch_rows(q + base + 32 * H * D, pl, left, 1, LD)
    sr.store(gl.load(rs + b.to(gl.int64) * (3 * C) + t1))
    ss.store(gl.load(sums + b.to(gl.int64) * (4 * C) + t2))
    p0 = base + pl
    p1 = p0 + 32 * H * D
    ml0 = gl.expand_dims(rl < left, 1)
    ml1 = gl.expand_dims(rl + 32 < left, 1)
    m0 = tok < left
    m1 = tok + 32 < left
    a = gl.exp(gl.load(A_log + i_h).to(gl.float32))
    b_bias = gl.load(bias + i_h * D + i_d * BD + ch).to(gl.float32)
    mbarrier.wait(z_bar, 0)
    ga0, e0 = log2_gates(tokens(sz, 0).load(MMA).to(gl.float32), m0, a, b_bias, lb, DOT)
    ga1, e1 = log2_gates(tokens(sz, 1).load(MMA).to(gl.float32), m1, a, b_bias, lb, DOT)
    to_end0 = ex2(e0 + shift)
    to_end1 = gl.expand_dims(ex2(e1 + shift), 1)
    whole = ex2(e0 + e1)
    ec = gl.expand_dims(ex2(e0), 1)
    e1 = gl.expand_dims(ex2(e1), 1)
    kt0 = to_channels(xk0, MMA)
    kt1 = to_channels(xk1, MMA)
    qt1 = to_channels(xq1, MMA)
    zero = gl.zeros([BD, 32], gl.float32, MMA)
    ye = ex2(0.0 - (product(ga0, tri, zero, False) + shift))
    ye = ye * gl.expand_dims(of_tokens(ss, 3, 0, TK), 0)
    yo = bf16(normed(kt0, of_tokens(sr, 1, 0, TK)) * ye * gl.expand_dims(to_end0, 1))
    mbarrier.wait(bar, 0)
    if left < C:
        clear_rows(sdo, left, LV)
        clear_rows(sx, left, LV)
        fence_async_shared()
        gl.thread_barrier()
    # sum over V of S dS: the diagonal of a product
    sq = gl.zeros([BD, BD], gl.float32, MSQ)
    sq = warpgroup_mma(sS, sD.permute((1, 0)), sq, use_acc=False, is_async=True)
    sq = warpgroup_mma_wait(0, deps=[sq])
    last = gl.convert_layout(gl.sum(gl.where(eye, sq, 0.0), 1), CH) * whole
    # block 1
    ya = gl.convert_layout(yo, DOT)
    A, tq, tk = row_products(ga1, tri, sS, sdo, sx, 1, zero, shift)
    tq, tk = pair(ya, ya, transposed(st, 2), transposed(st, 5), tq * ec, tk * (0.0 - ec), True)
    q_ = normed(qt1, of_tokens(sr, 0, 1, TK) * scale)
    k_ = normed(kt1, of_tokens(sr, 1, 1, TK))
    xe = ex2(A)
    F = xe * down
    qF = bf16(q_ * F)
    kF = bf16(k_ * F)
    dq_ = tq * F
    dk_ = tk * F
    dG1 = qF.to(gl.float32) * tq + kF.to(gl.float32) * tk
    ye = ex2(0.0 - A)
    ye = ye * gl.expand_dims(of_tokens(ss, 3, 1, TK), 0)
    tc = column_product(sD, su, 1, zero) * (ye * to_end1)
    dk_ += tc
    tc = tc * k_
    last += gl.sum(tc, 1)
    dG1 -= tc
    dq_, dk_, dG1 = diagonal(q_, k_, xe, ye, st, 1, dq_, dk_, dG1, zero, DOT)
    xk0 = fetch_rows(k + base, pl, left, 0, LD)
    xq0 = fetch_rows(q + base, pl, left, 0, LD)
    put_inputs(dq, dk, p1, dq_, dk_, qt1, kt1, sr, ss, 1, scale, ml1, LD, TK)
    # the gate's terms of block 1 wait in shared memory: registers are short in what follows
    last1 = gl.sum(dG1, 1)
    h, l = in_two(dG1)
    gl.thread_barrier()
    aside(su, 0).store(h)
    aside(su, 1).store(l)
    # block 0
    kt0 = to_channels(xk0, MMA)
    qt0 = to_channels(xq0, MMA)
    A, tq, tk = row_products(ga0, tri, sS, sdo, sx, 0, zero, shift)
    q_ = normed(qt0, of_tokens(sr, 0, 0, TK) * scale)
    k_ = normed(kt0, of_tokens(sr, 1, 0, TK))
    xe = ex2(A)
    F = xe * down
    dq_ = tq * F
    dk_ = 0.0 - tk * F
    dG0 = q_ * dq_ + k_ * dk_
    ye = ex2(0.0 - A)
    ye = ye * gl.expand_dims(of_tokens(ss, 3, 0, TK), 0)
    yo32 = yo.to(gl.float32)
    tc = column_product(sD, su, 0, zero) * e1
    last += gl.sum(yo32 * tc, 1)
    qa = gl.convert_layout(qF, DOT)
    ka = gl.convert_layout(kF, DOT)
    tc = chained(qa, ka, tile(st, 2), tile(st, 5), tc, True)
    dG0 -= yo32 * tc
    dk_ += tc * (ye * gl.expand_dims(to_end0, 1))
    dq_, dk_, dG0 = diagonal(q_, k_, xe, ye, st, 0, dq_, dk_, dG0, zero, DOT)
    put_inputs(dq, dk, p0, dq_, dk_, qt0, kt0, sr, ss, 0, scale, ml0, LD, TK)
    # decay: sum over this and later positions, then the bounded sigmoid
    R1 = suffix(aside(su, 0).load(MMA), aside(su, 1).load(MMA), suf, zero, DOT) + gl.expand_dims(last, 1)
    last += last1
    h, l = in_two(dG0)
    R0 = suffix(h, l, suf, zero, DOT) + gl.expand_dims(last, 1)
    dA0, db0 = put_gate(dz, tokens(sz, 0).load(MMA), p0, R0, m0, ml0, a, b_bias, lb, LD)
    dA1, db1 = put_gate(dz, tokens(sz, 1).load(MMA), p1, R1, m1, ml1, a, b_bias, lb, LD)
    b64 = b.to(gl.int64)
    gl.store(dAp + b64 * ND + i_d, gl.sum(dA0 + dA1, 0))
    gl.store(dbp + b64 * D + i_d * BD + ch, db0 + db1)
    mbarrier.invalidate(bar)
    mbarrier.invalidate(z_bar)
