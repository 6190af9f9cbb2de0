"""Gradients of a chunk's inputs from the states, their gradients and the chunk's own pairs of tokens.

``kda_pairs`` writes the gradients of the two score matrices as 32 x 32 tiles and the row sums that stand
for the l2 norms and beta: q.dq = dO.O and k.dk = -dV.V + 2 dV.U / beta. ``kda_grad`` then works on blocks
of 64 channels, laid out [channels, tokens].

The gate's gradient is a sum over positions of terms that enter at one token and leave at another. Each term
is formed twice, once per end, from the same rounded operands; so the ends cancel as in exact arithmetic and
bf16 operands are enough. The i = j terms do not depend on the gate and stay out of the products.

Imports triton: import it inside functions only.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from k3train.kernels.kda.triton_math import (
    ex2,
    log2_gates,
    product,
    put,
    sigmoid,
    store_triangles,
    to_channels,
)


@triton.jit
def kda_pairs(
    beta, v, o, do, us, dv, db, tiles, sums, chunks, H: tl.constexpr, V: tl.constexpr, DT: tl.constexpr
):
    C: tl.constexpr = 64
    i_h = tl.program_id(0) % H
    i_c = (tl.program_id(0) // H).to(tl.int64)
    first = tl.load(chunks + 2 * i_c).to(tl.int64)
    left = tl.load(chunks + 2 * i_c + 1)
    r = tl.arange(0, C)
    ov = tl.arange(0, V)
    m = r < left
    b = i_c * H + i_h
    row0 = first * H + i_h
    pv = (r * (H * V))[:, None] + ov[None, :]
    b_do = tl.load(do + row0 * V + pv, mask=m[:, None], other=0.0)
    b_x = tl.load(dv + row0 * V + pv, mask=m[:, None], other=0.0)
    b_u = tl.load(us + b * (C * V) + (r[:, None] * V + ov[None, :]))
    br = tl.load(beta + row0 + r * H, mask=m, other=0.0).to(tl.float32)
    u32 = b_u.to(tl.float32)
    x32 = b_x.to(tl.float32)
    d32 = b_do.to(tl.float32)
    xu = tl.sum(x32 * u32, 1)
    dd = tl.sum(d32 * u32, 1)
    sq = tl.sum(d32 * tl.load(o + row0 * V + pv, mask=m[:, None], other=0.0).to(tl.float32), 1)
    em = tl.exp(-tl.maximum(br, -30.0))
    sk = 2.0 * xu * (1.0 + em) - tl.sum(
        x32 * tl.load(v + row0 * V + pv, mask=m[:, None], other=0.0).to(tl.float32), 1
    )
    tl.store(db + row0 + r * H, (xu * em).to(db.dtype.element_ty), mask=m)
    ps = sums + b * (3 * C) + r
    tl.store(ps, dd)
    tl.store(ps + C, sq)
    tl.store(ps + 2 * C, sk)
    ut = tl.trans(b_u)
    i, j = r[:, None], r[None, :]
    pt = tiles + b * 6144 + (tl.where(i < 32, 0, tl.where(j < 32, 2048, 1024)) + (i % 32) * 32 + j % 32)
    keep = (i >= 32) | (j < 32)
    tl.store(pt, tl.where(i > j, tl.dot(b_do, ut), 0.0).to(DT), mask=keep)
    tl.store(pt + 3072, tl.where(i > j, -tl.dot(b_x, ut), 0.0).to(DT), mask=keep)


@gluon.jit
def state_product(a, b, MMA: gl.constexpr):
    acc = gl.zeros([64, 32], gl.float32, MMA)
    acc = warpgroup_mma(a, b, acc, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def normed(x, r):
    return x.to(gl.float32) * gl.expand_dims(r, 0)


@gluon.jit
def diagonal(q, k, ga, shift, tri, dA, dB, dq, dk, dG, MMA: gl.constexpr, DOT: gl.constexpr):
    """Adds one 32-token diagonal tile to dq, dk and the gate's gradient.

    The rounded operands of one product multiply the result of the other one, so that a pair of tokens adds
    the same number to the gate's gradient where it enters and where it leaves the sum over positions.
    """
    zero = gl.zeros_like(q)
    A = product(ga, tri, zero, False) + shift
    xe = ex2(A)
    ye = ex2(0.0 - A)
    y = (k * ye).to(gl.bfloat16)
    ya = gl.convert_layout(y, DOT)
    t = product(ya, dA.permute((1, 0)), zero, False)
    x = (q * xe).to(gl.bfloat16)
    dq += t * xe
    dG += x.to(gl.float32) * t
    tc = product(gl.convert_layout(x, DOT), dA, zero, False)
    t = product(ya, dB.permute((1, 0)), zero, False)
    x = (k * xe).to(gl.bfloat16)
    dk += t * xe
    dG += x.to(gl.float32) * t
    tc = product(gl.convert_layout(x, DOT), dB, tc, True)
    dk += tc * ye
    dG -= y.to(gl.float32) * tc
    return dq, dk, dG


@gluon.jit
def suffix(dG, tri, DOT: gl.constexpr):
    h = dG.to(gl.bfloat16)
    ha = gl.convert_layout(h, DOT)
    la = gl.convert_layout((dG - h.to(gl.float32)).to(gl.bfloat16), DOT)
    R = warpgroup_mma(ha, tri, gl.zeros_like(dG), use_acc=False, is_async=True)
    R = warpgroup_mma(la, tri, R, is_async=True)
    R, ha, la = warpgroup_mma_wait(0, deps=[R, ha, la])
    return R


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
    tiles,
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
    H: gl.constexpr,
    D: gl.constexpr,
    V: gl.constexpr,
):
    C: gl.constexpr = 64
    BD: gl.constexpr = 64
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    MSQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    DOT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    LD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])  # [32, 64] rows
    LV: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])  # [., 128] rows
    LT: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])  # [., 32] rows
    S128: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    S64: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    CH: gl.constexpr = gl.SliceLayout(1, MMA)
    TK: gl.constexpr = gl.SliceLayout(0, MMA)
    i_d = gl.program_id(0) % (D // BD)
    i_h = gl.program_id(0) // (D // BD) % H
    i_c = (gl.program_id(0) // (D // BD) // H).to(gl.int64)
    first = gl.load(chunks + 2 * i_c).to(gl.int64)
    left = gl.load(chunks + 2 * i_c + 1)
    b = i_c * H + i_h
    row0 = first * H + i_h
    # operands of the state products, copied while the gates are computed
    rv = gl.arange(0, 64, gl.SliceLayout(1, LV))
    cv = gl.arange(0, V, gl.SliceLayout(0, LV))
    tile = gl.expand_dims(rv * V, 1) + gl.expand_dims(cv, 0)
    strided = gl.expand_dims(rv * (H * V), 1) + gl.expand_dims(cv, 0)
    mv = gl.expand_dims(rv < left, 1)
    sS = gl.allocate_shared_memory(gl.bfloat16, [BD, V], S128)
    sD = gl.allocate_shared_memory(gl.bfloat16, [BD, V], S128)
    sdo = gl.allocate_shared_memory(gl.bfloat16, [C, V], S128)
    sx = gl.allocate_shared_memory(gl.bfloat16, [C, V], S128)
    su = gl.allocate_shared_memory(gl.bfloat16, [C, V], S128)
    st = gl.allocate_shared_memory(gl.bfloat16, [6, 32, 32], S64)
    ph = b * (D * V) + i_d * (BD * V)
    async_copy.async_copy_global_to_shared(sS, hs + ph + tile)
    async_copy.async_copy_global_to_shared(sD, dhs + ph + tile)
    async_copy.async_copy_global_to_shared(sdo, do + row0 * V + strided, mask=mv)
    async_copy.async_copy_global_to_shared(sx, dv + row0 * V + strided, mask=mv)
    async_copy.async_copy_global_to_shared(su, us + b * (C * V) + tile)
    rt = gl.arange(0, 32, gl.SliceLayout(1, LT))
    ct = gl.arange(0, 32, gl.SliceLayout(0, LT))
    pt = tiles + b * 6144 + gl.expand_dims(rt * 32, 1) + gl.expand_dims(ct, 0)
    for n in gl.static_range(6):
        async_copy.async_copy_global_to_shared(st.index(n), pt + n * 1024)
    async_copy.commit_group()
    # q, k, z of both 32-token blocks
    rl = gl.arange(0, 32, gl.SliceLayout(1, LD))
    cl = gl.arange(0, BD, gl.SliceLayout(0, LD))
    p0 = row0 * D + i_d * BD + (gl.expand_dims(rl * (H * D), 1) + gl.expand_dims(cl, 0))
    p1 = p0 + 32 * H * D
    ml0 = gl.expand_dims(rl < left, 1)
    ml1 = gl.expand_dims(rl + 32 < left, 1)
    xz0 = gl.load(z + p0, mask=ml0, other=0.0)
    xk0 = gl.load(k + p0, mask=ml0, other=0.0)
    xz1 = gl.load(z + p1, mask=ml1, other=0.0)
    xk1 = gl.load(k + p1, mask=ml1, other=0.0)
    xq1 = gl.load(q + p1, mask=ml1, other=0.0)
    a = gl.exp(gl.load(A_log + i_h).to(gl.float32))
    ch = gl.arange(0, BD, CH)
    tok = gl.arange(0, 32, TK)
    b_bias = gl.load(bias + i_h * D + i_d * BD + ch).to(gl.float32)
    prs = rs + b * (2 * C) + tok
    m0 = tok < left
    m1 = tok + 32 < left
    i = gl.expand_dims(rt, 1)
    j = gl.expand_dims(ct, 0)
    tri = gl.allocate_shared_memory(gl.float16, [3, 32, 32], S64)
    store_triangles(tri, LT)
    suf = gl.allocate_shared_memory(gl.bfloat16, [32, 32], S64)
    suf.store((i >= j).to(gl.bfloat16))
    fence_async_shared()
    zt0 = to_channels(xz0, MMA)
    kt0 = to_channels(xk0, MMA)
    zt1 = to_channels(xz1, MMA)
    kt1 = to_channels(xk1, MMA)
    qt1 = to_channels(xq1, MMA)
    ga0, e0 = log2_gates(zt0, m0, a, b_bias, lb, DOT)
    ga1, e1 = log2_gates(zt1, m1, a, b_bias, lb, DOT)
    zero = gl.zeros([BD, 32], gl.float32, MMA)
    yo = (normed(kt0, gl.load(prs + 64)) * ex2(product(ga0, tri.index(1), zero, False))).to(gl.bfloat16)
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()
    sq = gl.zeros([BD, BD], gl.float32, MSQ)  # sum over V of S dS: a diagonal
    sq = warpgroup_mma(sS, sD.permute((1, 0)), sq, use_acc=False, is_async=True)
    sq = warpgroup_mma_wait(0, deps=[sq])
    eye = gl.expand_dims(gl.arange(0, BD, gl.SliceLayout(1, MSQ)), 1) == gl.expand_dims(
        gl.arange(0, BD, gl.SliceLayout(0, MSQ)), 0
    )
    last = gl.convert_layout(gl.sum(gl.where(eye, sq, 0.0), 1), CH) * (e0 * e1)
    psm = sums + b * (3 * C) + tok
    ec = gl.expand_dims(e0, 1)
    ya = gl.convert_layout(yo, DOT)
    # block 1
    F = ex2(product(ga1, tri.index(0), zero, False))
    t = state_product(sS, sdo.slice(32, 32, 0).permute((1, 0)), MMA) * ec
    t = product(ya, st.index(2).permute((1, 0)), t, True)
    q_ = normed(qt1, gl.load(prs + 32) * scale)
    qF = (q_ * F).to(gl.bfloat16)
    dq_ = t * F
    dG1 = qF.to(gl.float32) * t
    t = state_product(sS, sx.slice(32, 32, 0).permute((1, 0)), MMA) * (0.0 - ec)
    t = product(ya, st.index(5).permute((1, 0)), t, True)
    k_ = normed(kt1, gl.load(prs + 96))
    kF = (k_ * F).to(gl.bfloat16)
    dk_ = t * F
    dG1 += kF.to(gl.float32) * t
    t = state_product(sD, su.slice(32, 32, 0).permute((1, 0)), MMA) * ex2(
        product(ga1, tri.index(1), zero, False)
    )
    dk_ += t
    t = t * k_
    last += gl.sum(t, 1)
    dG1 -= t
    dq_, dk_, dG1 = diagonal(
        q_, k_, ga1, shift, tri.index(2), st.index(1), st.index(4), dq_, dk_, dG1, MMA, DOT
    )
    xk0 = gl.load(k + p0, mask=ml0, other=0.0)
    xq0 = gl.load(q + p0, mask=ml0, other=0.0)
    dd = gl.expand_dims(gl.load(psm + 32), 0)
    q_ = normed(qt1, gl.load(prs + 32) * scale)
    k_ = normed(kt1, gl.load(prs + 96))
    put(
        dq + p1,
        gl.expand_dims(gl.load(prs + 32), 0)
        * ((dq_ + dd * k_) * scale - q_ * gl.expand_dims(gl.load(psm + 96) / scale, 0)),
        ml1,
        LD,
    )
    put(
        dk + p1,
        gl.expand_dims(gl.load(prs + 96), 0) * (dk_ + dd * q_ - k_ * gl.expand_dims(gl.load(psm + 160), 0)),
        ml1,
        LD,
    )
    # block 0
    kt0 = to_channels(xk0, MMA)
    qt0 = to_channels(xq0, MMA)
    F = ex2(product(ga0, tri.index(0), zero, False))
    t = state_product(sS, sdo.slice(0, 32, 0).permute((1, 0)), MMA)
    q_ = normed(qt0, gl.load(prs) * scale)
    dq_ = t * F
    dG0 = q_ * dq_
    t = state_product(sS, sx.slice(0, 32, 0).permute((1, 0)), MMA)
    k_ = normed(kt0, gl.load(prs + 64))
    dk_ = 0.0 - t * F
    dG0 += k_ * dk_
    t = state_product(sD, su.slice(0, 32, 0).permute((1, 0)), MMA) * gl.expand_dims(e1, 1)
    yo32 = yo.to(gl.float32)
    last += gl.sum(yo32 * t, 1)
    t = product(gl.convert_layout(qF, DOT), st.index(2), t, True)
    t = product(gl.convert_layout(kF, DOT), st.index(5), t, True)
    dG0 -= yo32 * t
    dk_ += t * ex2(product(ga0, tri.index(1), zero, False))
    dq_, dk_, dG0 = diagonal(
        q_, k_, ga0, shift, tri.index(2), st.index(0), st.index(3), dq_, dk_, dG0, MMA, DOT
    )
    dd = gl.expand_dims(gl.load(psm), 0)
    q_ = normed(qt0, gl.load(prs) * scale)
    k_ = normed(kt0, gl.load(prs + 64))
    put(
        dq + p0,
        gl.expand_dims(gl.load(prs), 0)
        * ((dq_ + dd * k_) * scale - q_ * gl.expand_dims(gl.load(psm + 64) / scale, 0)),
        ml0,
        LD,
    )
    put(
        dk + p0,
        gl.expand_dims(gl.load(prs + 64), 0) * (dk_ + dd * q_ - k_ * gl.expand_dims(gl.load(psm + 128), 0)),
        ml0,
        LD,
    )
    # decay: sum over this and later positions, then the bounded sigmoid
    R1 = suffix(dG1, suf, DOT) + gl.expand_dims(last, 1)
    last += gl.sum(dG1, 1)
    R0 = suffix(dG0, suf, DOT) + gl.expand_dims(last, 1)
    zb = to_channels(gl.load(z + p0, mask=ml0, other=0.0), MMA).to(gl.float32) + gl.expand_dims(b_bias, 1)
    s = sigmoid(zb * a)
    R0 = gl.where(gl.expand_dims(m0, 0), R0 * (a * lb) * s * (1.0 - s), 0.0)
    put(dz + p0, R0, ml0, LD)
    dA = gl.sum(R0 * zb, 1)
    zb = to_channels(gl.load(z + p1, mask=ml1, other=0.0), MMA).to(gl.float32) + gl.expand_dims(b_bias, 1)
    s = sigmoid(zb * a)
    R1 = gl.where(gl.expand_dims(m1, 0), R1 * (a * lb) * s * (1.0 - s), 0.0)
    put(dz + p1, R1, ml1, LD)
    gl.store(dAp + b * (D // BD) + i_d, gl.sum(dA + gl.sum(R1 * zb, 1), 0))
    gl.store(dbp + b * D + i_d * BD + ch, gl.sum(R0 + R1, 1))
