"""The chain that writes the output: a program carries a head's state through a segment.

Rows, operands and layouts are those of ``triton_chain``; the last state is stored too where it is asked for.

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


@gluon.jit
def kda_output(
    v,
    kh,
    kt,
    qh,
    tb,
    aqk,
    dec,
    o,
    h0,
    ht,
    rows,
    H: gl.constexpr,
    D: gl.constexpr,
    V: gl.constexpr,
    BV: gl.constexpr,
    HAS_H0: gl.constexpr,
    STORE_HT: gl.constexpr,
    STAGES: gl.constexpr,
    W: gl.constexpr,
):
    C: gl.constexpr = 64
    MS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, BV, 16])
    MT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, W // 4], [16, BV // (W // 4), 16])
    LO: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [W, 1], [1, 0])
    i_v = gl.program_id(0)
    i_h = gl.program_id(1)
    row = rows + 6 * gl.program_id(2)
    bos = gl.load(row)
    T = gl.load(row + 1)
    c0 = gl.load(row + 2)
    i_in = gl.load(row + 3)
    i_out = gl.load(row + 4)
    NT = (T + C - 1) // C
    SV: gl.constexpr = v.layout
    skh = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, D], kh.layout)
    skt = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, D], kt.layout)
    stb = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], tb.layout)
    sv = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, BV], v.layout)
    sqh = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, D], qh.layout)
    saq = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], aqk.layout)
    sS = gl.allocate_shared_memory(gl.bfloat16, [D, BV], SV)
    sR = gl.allocate_shared_memory(gl.bfloat16, [C, BV], SV)
    sU = gl.allocate_shared_memory(gl.bfloat16, [C, BV], SV)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(bars.index(s), count=1)
    BYTES: gl.constexpr = 2 * C * (3 * D + 2 * C + BV)
    for s in gl.static_range(STAGES):
        go = s < NT
        bar = bars.index(s)
        b = (c0 + s) * H + i_h
        mbarrier.expect(bar, BYTES, pred=go)
        tma.async_copy_global_to_shared(kh, [b * C, 0], bar, skh.index(s), pred=go)
        tma.async_copy_global_to_shared(v, [bos + s * C, i_h * V + i_v * BV], bar, sv.index(s), pred=go)
        tma.async_copy_global_to_shared(tb, [b * C, 0], bar, stb.index(s), pred=go)
        tma.async_copy_global_to_shared(kt, [b * C, 0], bar, skt.index(s), pred=go)
        tma.async_copy_global_to_shared(qh, [b * C, 0], bar, sqh.index(s), pred=go)
        tma.async_copy_global_to_shared(aqk, [b * C, 0], bar, saq.index(s), pred=go)
    dS = gl.arange(0, D, gl.SliceLayout(1, MS))
    vS = gl.arange(0, BV, gl.SliceLayout(0, MS))
    pS = i_h.to(gl.int64) * (D * V) + i_v * BV + gl.expand_dims(dS * V, 1) + gl.expand_dims(vS, 0)
    S = gl.zeros([D, BV], gl.float32, MS)
    if HAS_H0:
        known = gl.expand_dims(dS < D * (i_in + 1), 1)
        S = gl.load(h0 + i_in.to(gl.int64) * (H * D * V) + pS, mask=known, other=0.0)
    sS.store(S.to(gl.bfloat16))
    zero = gl.zeros([C, BV], gl.float32, MT)
    rT = gl.arange(0, C, gl.SliceLayout(1, MT))
    rO = gl.arange(0, C, gl.SliceLayout(1, LO))
    vO = gl.arange(0, BV, gl.SliceLayout(0, LO))
    pO = (bos.to(gl.int64) * H + i_h) * V + i_v * BV + gl.expand_dims(rO * (H * V), 1) + gl.expand_dims(vO, 0)
    d_next = gl.load(dec + (c0 * H + i_h).to(gl.int64) * D + dS, mask=dS < NT * D, other=0.0)
    for i in range(NT):
        slot = i % STAGES
        bar = bars.index(slot)
        left = T - i * C
        b = (c0 + i) * H + i_h
        d_now = d_next
        d_next = gl.load(dec + (b + H).to(gl.int64) * D + dS, mask=dS < (NT - 1 - i) * D, other=0.0)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.wait(bar, (i // STAGES) & 1)
        R = warpgroup_mma(skh.index(slot), sS, zero, use_acc=False, is_async=True)
        O = warpgroup_mma(sqh.index(slot), sS, zero, use_acc=False, is_async=True)
        R = warpgroup_mma_wait(1, deps=[R])
        x = sv.index(slot).load(MT).to(gl.float32) - R
        sR.store(gl.where(gl.expand_dims(rT < left, 1), x, 0.0).to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        U = warpgroup_mma(stb.index(slot), sR, zero, use_acc=False, is_async=True)
        U, O = warpgroup_mma_wait(0, deps=[U, O])
        sU.store(U.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        O = warpgroup_mma(saq.index(slot), sU, O, is_async=True)
        S = warpgroup_mma(skt.index(slot).permute((1, 0)), sU, S * gl.expand_dims(d_now, 1), is_async=True)
        O = warpgroup_mma_wait(1, deps=[O])
        sR.store(O.to(gl.bfloat16))
        gl.thread_barrier()
        gl.store(o + pO + i * (C * H * V), sR.load(LO), mask=gl.expand_dims(rO < left, 1))
        S = warpgroup_mma_wait(0, deps=[S])
        gl.thread_barrier()
        go = i + STAGES < NT
        n = b + STAGES * H
        mbarrier.expect(bar, BYTES, pred=go)
        tma.async_copy_global_to_shared(kh, [n * C, 0], bar, skh.index(slot), pred=go)
        tma.async_copy_global_to_shared(
            v, [bos + (i + STAGES) * C, i_h * V + i_v * BV], bar, sv.index(slot), pred=go
        )
        tma.async_copy_global_to_shared(tb, [n * C, 0], bar, stb.index(slot), pred=go)
        tma.async_copy_global_to_shared(kt, [n * C, 0], bar, skt.index(slot), pred=go)
        tma.async_copy_global_to_shared(qh, [n * C, 0], bar, sqh.index(slot), pred=go)
        tma.async_copy_global_to_shared(aqk, [n * C, 0], bar, saq.index(slot), pred=go)
        sS.store(S.to(gl.bfloat16))
    if STORE_HT:
        gl.store(ht + i_out.to(gl.int64) * (H * D * V) + pS, S, mask=gl.expand_dims(dS < D * (i_out + 1), 1))
    for s in gl.static_range(STAGES):
        mbarrier.invalidate(bars.index(s))
