"""The sequential part of KDA: one program carries a head's state, or its gradient, through a segment.

``rows`` holds a segment each, a whole document or a part of one, as ``segments`` describes: first token,
tokens, first chunk, where the state that enters lies in ``h0`` and where the one that leaves goes in ``ht``
(negative: nowhere; for gradients ``dht`` and ``dh0``), and whether values count as zero and the state starts
as the identity. With MAP nothing but the last state is stored.

Operands come through a ring of shared-memory slots filled by bulk tensor copies while earlier chunks are
computed; the state stays in fp32 accumulators. Every left operand of a product lies in shared memory.

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
def kda_states(
    v,
    kh,
    kt,
    tb,
    hs,
    us,
    dec,
    h0,
    ht,
    rows,
    H: gl.constexpr,
    D: gl.constexpr,
    V: gl.constexpr,
    BV: gl.constexpr,
    HAS_H0: gl.constexpr,
    MAP: gl.constexpr,
    STAGES: gl.constexpr,
    W: gl.constexpr,
):
    """Store the states and the corrections of all chunks; with MAP the last state instead."""
    C: gl.constexpr = 64
    MS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, BV, 16])
    MT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, W // 4], [16, BV // (W // 4), 16])
    i_v = gl.program_id(0)
    i_h = gl.program_id(1)
    row = rows + 6 * gl.program_id(2)
    bos = gl.load(row)
    T = gl.load(row + 1)
    c0 = gl.load(row + 2)
    i_in = gl.load(row + 3)
    i_out = gl.load(row + 4)
    # a transition is the state that the identity becomes without values
    values = gl.load(row + 5) == 0
    NT = (T + C - 1) // C
    SV: gl.constexpr = v.layout
    skh = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, D], kh.layout)
    skt = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, D], kt.layout)
    stb = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], tb.layout)
    sv = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, BV], SV)
    sS = gl.allocate_shared_memory(gl.bfloat16, [D, BV], SV)
    if not MAP:
        sR = gl.allocate_shared_memory(gl.bfloat16, [C, BV], SV)
        sU = gl.allocate_shared_memory(gl.bfloat16, [C, BV], SV)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(bars.index(s), count=1)
    BYTES: gl.constexpr = 2 * C * (2 * D + C)
    column = i_h * V + i_v * BV
    for s in gl.static_range(STAGES):
        go = s < NT
        bar = bars.index(s)
        b = (c0 + s) * H + i_h
        some = go
        if MAP:
            some = go & values
            mbarrier.expect(bar, BYTES, pred=go & (not values))
        mbarrier.expect(bar, BYTES + 2 * C * BV, pred=some)
        tma.async_copy_global_to_shared(kh, [b * C, 0], bar, skh.index(s), pred=go)
        tma.async_copy_global_to_shared(v, [bos + s * C, column], bar, sv.index(s), pred=some)
        tma.async_copy_global_to_shared(tb, [b * C, 0], bar, stb.index(s), pred=go)
        tma.async_copy_global_to_shared(kt, [b * C, 0], bar, skt.index(s), pred=go)
    dS = gl.arange(0, D, gl.SliceLayout(1, MS))
    vS = gl.arange(0, BV, gl.SliceLayout(0, MS))
    pS = i_h.to(gl.int64) * (D * V) + i_v * BV + gl.expand_dims(dS * V, 1) + gl.expand_dims(vS, 0)
    S = gl.zeros([D, BV], gl.float32, MS)
    if HAS_H0:
        known = gl.expand_dims(dS < D * (i_in + 1), 1)
        S = gl.load(h0 + i_in.to(gl.int64) * (H * D * V) + pS, mask=known, other=0.0)
    if MAP:
        one = gl.expand_dims(dS, 1) == gl.expand_dims(vS + i_v * BV, 0)
        S = gl.where(one & (not values), 1.0, S)
    sS.store(S.to(gl.bfloat16))
    zero = gl.zeros([C, BV], gl.float32, MT)
    rT = gl.arange(0, C, gl.SliceLayout(1, MT))
    d_next = gl.load(dec + (c0 * H + i_h).to(gl.int64) * D + dS, mask=dS < NT * D, other=0.0)
    for i in range(NT):
        slot = i % STAGES
        bar = bars.index(slot)
        b = (c0 + i) * H + i_h
        d_now = d_next
        d_next = gl.load(dec + (b + H).to(gl.int64) * D + dS, mask=dS < (NT - 1 - i) * D, other=0.0)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.wait(bar, (i // STAGES) & 1)
        R = warpgroup_mma(skh.index(slot), sS, zero, use_acc=False, is_async=True)
        if not MAP:
            tma.async_copy_shared_to_global(hs, [b * D, i_v * BV], sS)
        R = warpgroup_mma_wait(0, deps=[R])
        # without stores of its own a map works in the slot of v: two programs fit a processor
        room = sv.index(slot) if MAP else sR
        x = sv.index(slot).load(MT).to(gl.float32)
        if MAP:
            x = gl.where(gl.expand_dims(rT < gl.where(values, T - i * C, 0), 1), x, 0.0)
        x = x - R
        room.store(gl.where(gl.expand_dims(rT < T - i * C, 1), x, 0.0).to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        U = warpgroup_mma(stb.index(slot), room, zero, use_acc=False, is_async=True)
        U = warpgroup_mma_wait(0, deps=[U])
        if MAP:
            gl.thread_barrier()
        corrected = room if MAP else sU
        corrected.store(U.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        if not MAP:
            tma.async_copy_shared_to_global(us, [b * C, i_v * BV], sU)
        S = warpgroup_mma(
            skt.index(slot).permute((1, 0)), corrected, S * gl.expand_dims(d_now, 1), is_async=True
        )
        S = warpgroup_mma_wait(0, deps=[S])
        if not MAP:
            tma.store_wait(0)
        gl.thread_barrier()
        go = i + STAGES < NT
        n = b + STAGES * H
        some = go
        if MAP:
            some = go & values
            mbarrier.expect(bar, BYTES, pred=go & (not values))
        mbarrier.expect(bar, BYTES + 2 * C * BV, pred=some)
        tma.async_copy_global_to_shared(kh, [n * C, 0], bar, skh.index(slot), pred=go)
        token = bos + (i + STAGES) * C
        tma.async_copy_global_to_shared(v, [token, column], bar, sv.index(slot), pred=some)
        tma.async_copy_global_to_shared(tb, [n * C, 0], bar, stb.index(slot), pred=go)
        tma.async_copy_global_to_shared(kt, [n * C, 0], bar, skt.index(slot), pred=go)
        sS.store(S.to(gl.bfloat16))
    if MAP:
        gl.store(ht + i_out.to(gl.int64) * (H * D * V) + pS, S)
    for s in gl.static_range(STAGES):
        mbarrier.invalidate(bars.index(s))


@gluon.jit
def kda_bchain(
    do,
    kh,
    kt,
    qh,
    tb,
    aqk,
    dhs,
    dec,
    dv,
    dht,
    dh0,
    rows,
    H: gl.constexpr,
    D: gl.constexpr,
    V: gl.constexpr,
    BV: gl.constexpr,
    HAS_DHT: gl.constexpr,
    STORE_DH0: gl.constexpr,
    MAP: gl.constexpr,
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
    SV: gl.constexpr = do.layout
    skh = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, D], kh.layout)
    skt = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, D], kt.layout)
    stb = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], tb.layout)
    sdo = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, BV], do.layout)
    sqh = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, D], qh.layout)
    saq = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], aqk.layout)
    sS = gl.allocate_shared_memory(gl.bfloat16, [D, BV], SV)
    sU = gl.allocate_shared_memory(gl.bfloat16, [C, BV], SV)
    sX = gl.allocate_shared_memory(gl.bfloat16, [C, BV], SV)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(bars.index(s), count=1)
    BYTES: gl.constexpr = 2 * C * (3 * D + 2 * C + BV)
    for s in gl.static_range(STAGES):
        go = s < NT
        bar = bars.index(s)
        c = NT - 1 - s
        b = (c0 + c) * H + i_h
        mbarrier.expect(bar, BYTES, pred=go)
        tma.async_copy_global_to_shared(do, [bos + c * C, i_h * V + i_v * BV], bar, sdo.index(s), pred=go)
        tma.async_copy_global_to_shared(aqk, [b * C, 0], bar, saq.index(s), pred=go)
        tma.async_copy_global_to_shared(kt, [b * C, 0], bar, skt.index(s), pred=go)
        tma.async_copy_global_to_shared(tb, [b * C, 0], bar, stb.index(s), pred=go)
        tma.async_copy_global_to_shared(qh, [b * C, 0], bar, sqh.index(s), pred=go)
        tma.async_copy_global_to_shared(kh, [b * C, 0], bar, skh.index(s), pred=go)
    dS = gl.arange(0, D, gl.SliceLayout(1, MS))
    vS = gl.arange(0, BV, gl.SliceLayout(0, MS))
    pS = i_h.to(gl.int64) * (D * V) + i_v * BV + gl.expand_dims(dS * V, 1) + gl.expand_dims(vS, 0)
    S = gl.zeros([D, BV], gl.float32, MS)
    if HAS_DHT:
        known = gl.expand_dims(dS < D * (i_in + 1), 1)
        S = gl.load(dht + i_in.to(gl.int64) * (H * D * V) + pS, mask=known, other=0.0)
    sS.store(S.to(gl.bfloat16))
    zero = gl.zeros([C, BV], gl.float32, MT)
    rT = gl.arange(0, C, gl.SliceLayout(1, MT))
    rO = gl.arange(0, C, gl.SliceLayout(1, LO))
    vO = gl.arange(0, BV, gl.SliceLayout(0, LO))
    pO = (bos.to(gl.int64) * H + i_h) * V + i_v * BV + gl.expand_dims(rO * (H * V), 1) + gl.expand_dims(vO, 0)
    d_next = gl.load(dec + ((c0 + NT - 1) * H + i_h).to(gl.int64) * D + dS, mask=dS < NT * D, other=0.0)
    for ii in range(NT):
        i = NT - 1 - ii
        slot = ii % STAGES
        bar = bars.index(slot)
        left = T - i * C
        b = (c0 + i) * H + i_h
        d_now = d_next
        d_next = gl.load(dec + (b - H).to(gl.int64) * D + dS, mask=dS < i * D, other=0.0)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.wait(bar, (ii // STAGES) & 1)
        if not MAP:
            tma.async_copy_shared_to_global(dhs, [b * D, i_v * BV], sS)
        if left < C:
            # rows past the document's end belong to the next document
            x = sdo.index(slot).load(MT)
            sdo.index(slot).store(gl.where(gl.expand_dims(rT < left, 1), x, 0.0))
            fence_async_shared()
            gl.thread_barrier()
        U = warpgroup_mma(
            saq.index(slot).permute((1, 0)), sdo.index(slot), zero, use_acc=False, is_async=True
        )
        U = warpgroup_mma(skt.index(slot), sS, U, is_async=True)
        S = warpgroup_mma(
            sqh.index(slot).permute((1, 0)), sdo.index(slot), S * gl.expand_dims(d_now, 1), is_async=True
        )
        U = warpgroup_mma_wait(1, deps=[U])
        sU.store(U.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        X = warpgroup_mma(stb.index(slot).permute((1, 0)), sU, zero, use_acc=False, is_async=True)
        X, S = warpgroup_mma_wait(0, deps=[X, S])
        sX.store((0.0 - X).to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        S = warpgroup_mma(skh.index(slot).permute((1, 0)), sX, S, is_async=True)
        if not MAP:
            x = sX.load(LO).to(gl.float32)
            gl.store(dv + pO + i * (C * H * V), (0.0 - x).to(gl.bfloat16), mask=gl.expand_dims(rO < left, 1))
        S = warpgroup_mma_wait(0, deps=[S])
        if not MAP:
            tma.store_wait(0)
        gl.thread_barrier()
        go = ii + STAGES < NT
        c = i - STAGES
        n = b - STAGES * H
        mbarrier.expect(bar, BYTES, pred=go)
        tma.async_copy_global_to_shared(do, [bos + c * C, i_h * V + i_v * BV], bar, sdo.index(slot), pred=go)
        tma.async_copy_global_to_shared(aqk, [n * C, 0], bar, saq.index(slot), pred=go)
        tma.async_copy_global_to_shared(kt, [n * C, 0], bar, skt.index(slot), pred=go)
        tma.async_copy_global_to_shared(tb, [n * C, 0], bar, stb.index(slot), pred=go)
        tma.async_copy_global_to_shared(qh, [n * C, 0], bar, sqh.index(slot), pred=go)
        tma.async_copy_global_to_shared(kh, [n * C, 0], bar, skh.index(slot), pred=go)
        sS.store(S.to(gl.bfloat16))
    if STORE_DH0:
        gl.store(dh0 + i_out.to(gl.int64) * (H * D * V) + pS, S, mask=gl.expand_dims(dS < D * (i_out + 1), 1))
    for s in gl.static_range(STAGES):
        mbarrier.invalidate(bars.index(s))
