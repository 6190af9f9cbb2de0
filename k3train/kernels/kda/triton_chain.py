"""The sequential part of KDA: one program carries a head's state, or its gradient, through a segment.

``rows`` holds a segment each, a whole document or a part of one, as ``segments`` describes: first token,
tokens, first chunk, where the state that enters lies in ``h0`` and where the one that leaves goes in ``ht``
(negative: nowhere; for gradients ``dht`` and ``dh0``), and whether values count as zero and the state starts
as the identity. With MAP nothing but the last state is stored.

Operands come through a ring of shared-memory slots filled by bulk tensor copies while earlier chunks are
computed; the state stays in fp32 accumulators. ``kda_states`` keeps it transposed: the accumulators of one
product, rounded, are the left operand of the next without a move. ``kda_bchain`` has its in shared memory.

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

from k3train.kernels.kda.triton_math import bf16, wide
from k3train.kernels.kda.triton_ring import (
    arrived,
    dismiss,
    expect,
    expect_all,
    factors,
    fetch,
    fetch_all,
    ring,
    segment,
    state_in,
    state_out,
    state_places,
    turned,
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
):
    """Store the states and the corrections of all chunks; with MAP the last state instead."""
    C: gl.constexpr = 64
    W: gl.constexpr = BV // 16
    MS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, D, 16])
    MT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, C, 16])
    DOT: gl.constexpr = gl.DotOperandLayout(0, MT, 2)
    LD: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    i_v = gl.program_id(0)
    i_h = gl.program_id(1)
    bos, T, c0, i_in, i_out = segment(rows)
    # a transition is the state that the identity becomes without values
    values = gl.load(rows + 6 * gl.program_id(2) + 5) == 0
    NT = (T + C - 1) // C
    rkh = ring(kh, STAGES)
    rv = ring(v, STAGES)
    rtb = ring(tb, STAGES)
    rkt = ring(kt, STAGES)
    sd = gl.allocate_shared_memory(gl.float32, [D], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if not MAP:
        sS = gl.allocate_shared_memory(gl.bfloat16, [D, BV], v.layout)
        sU = gl.allocate_shared_memory(gl.bfloat16, [C, BV], v.layout)
    column = i_h * V + i_v * BV
    for s in gl.static_range(STAGES):
        expect(v, rv, s, (s < NT) & values)
        expect_all((kh, tb, kt), (rkh, rtb, rkt), s, s < NT)
    for s in gl.static_range(STAGES):
        fetch(v, bos + s * C, column, rv, s, (s < NT) & values)
        fetch_all((kh, tb, kt), (rkh, rtb, rkt), (c0 + s) * H + i_h, s, s < NT)
    pS, dS = state_places(i_h, i_v, D, V, BV, MS, 1)
    S = gl.zeros([BV, D], gl.float32, MS)
    if HAS_H0:
        S = state_in(h0, i_in, pS, dS, H, D, V, 1)
    if MAP:
        one = gl.expand_dims(gl.arange(0, BV, gl.SliceLayout(1, MS)) + i_v * BV, 1) == gl.expand_dims(dS, 0)
        S = gl.where(one & (not values), 1.0, S)
    zero = gl.zeros([BV, C], gl.float32, MT)
    rT = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(0, MT)), 0)
    d = gl.arange(0, D, LD)
    sd.store(gl.load(dec + (c0 * H + i_h).to(gl.int64) * D + d, mask=d < NT * D, other=0.0))
    gl.thread_barrier()
    for i in range(NT):
        left = T - i * C
        b = (c0 + i) * H + i_h
        d_next = gl.load(dec + (b + H).to(gl.int64) * D + d, mask=d < (NT - 1 - i) * D, other=0.0)
        h = bf16(S)
        a = gl.convert_layout(h, DOT, assert_trivial=True)
        R = warpgroup_mma(a, turned(arrived(rkh, i, STAGES)), zero, use_acc=False, is_async=True)
        if not MAP:
            turned(sS).store(h)
            fence_async_shared()
        x = wide(turned(arrived(rv, i, STAGES, values)).load(MT))
        x = gl.where(rT < gl.where(values, left, 0), x, 0.0)
        S = S * factors(sd, MS)
        R, a = warpgroup_mma_wait(0, deps=[R, a])
        x -= R
        a = gl.convert_layout(bf16(x), DOT, assert_trivial=True)
        U = warpgroup_mma(a, turned(arrived(rtb, i, STAGES)), x, is_async=True)
        update = arrived(rkt, i, STAGES)
        U, a = warpgroup_mma_wait(0, deps=[U, a])
        u = bf16(U)
        a = gl.convert_layout(u, DOT, assert_trivial=True)
        S = warpgroup_mma(a, update, S, is_async=True)
        if not MAP:
            turned(sU).store(u)
            fence_async_shared()
        go = i + STAGES < NT
        expect(v, rv, i % STAGES, go & values)
        expect_all((kh, tb), (rkh, rtb), i % STAGES, go)
        gl.thread_barrier()
        sd.store(d_next)
        if not MAP:
            tma.async_copy_shared_to_global(hs, [b * D, i_v * BV], sS)
            tma.async_copy_shared_to_global(us, [b * C, i_v * BV], sU)
        fetch(v, bos + (i + STAGES) * C, column, rv, i % STAGES, go & values)
        fetch_all((kh, tb), (rkh, rtb), b + STAGES * H, i % STAGES, go)
        S, a = warpgroup_mma_wait(0, deps=[S, a])
        expect(kt, rkt, i % STAGES, go)
        if not MAP:
            tma.store_wait(0)
        gl.thread_barrier()
        fetch(kt, (b + STAGES * H) * C, 0, rkt, i % STAGES, go)
    if MAP:
        gl.store(ht + i_out.to(gl.int64) * (H * D * V) + pS, S)
    dismiss((rkh, rv, rtb, rkt), STAGES)


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
    bos, T, c0, i_in, i_out = segment(rows)
    NT = (T + C - 1) // C
    rdo = ring(do, STAGES)
    raq = ring(aqk, STAGES)
    rkt = ring(kt, STAGES)
    rqh = ring(qh, STAGES)
    rtb = ring(tb, STAGES)
    rkh = ring(kh, STAGES)
    operands = (aqk, kt, qh, tb, kh)
    rings = (raq, rkt, rqh, rtb, rkh)
    sS = gl.allocate_shared_memory(gl.bfloat16, [D, BV], do.layout)
    sU = gl.allocate_shared_memory(gl.bfloat16, [C, BV], do.layout)
    sX = gl.allocate_shared_memory(gl.bfloat16, [C, BV], do.layout)
    column = i_h * V + i_v * BV
    for s in gl.static_range(STAGES):
        expect(do, rdo, s, s < NT)
        expect_all(operands, rings, s, s < NT)
    for s in gl.static_range(STAGES):
        fetch(do, bos + (NT - 1 - s) * C, column, rdo, s, s < NT)
        fetch_all(operands, rings, (c0 + NT - 1 - s) * H + i_h, s, s < NT)
    pS, dS = state_places(i_h, i_v, D, V, BV, MS, 0)
    S = gl.zeros([D, BV], gl.float32, MS)
    if HAS_DHT:
        S = state_in(dht, i_in, pS, dS, H, D, V, 0)
    sS.store(S.to(gl.bfloat16))
    zero = gl.zeros([C, BV], gl.float32, MT)
    rT = gl.arange(0, C, gl.SliceLayout(1, MT))
    rO = gl.arange(0, C, gl.SliceLayout(1, LO))
    vO = gl.arange(0, BV, gl.SliceLayout(0, LO))
    pO = bos.to(gl.int64) * (H * V) + column + gl.expand_dims(rO * (H * V), 1) + gl.expand_dims(vO, 0)
    d_next = gl.load(dec + ((c0 + NT - 1) * H + i_h).to(gl.int64) * D + dS, mask=dS < NT * D, other=0.0)
    for ii in range(NT):
        i = NT - 1 - ii
        left = T - i * C
        b = (c0 + i) * H + i_h
        d_now = d_next
        d_next = gl.load(dec + (b - H).to(gl.int64) * D + dS, mask=dS < i * D, other=0.0)
        fence_async_shared()
        gl.thread_barrier()
        if not MAP:
            tma.async_copy_shared_to_global(dhs, [b * D, i_v * BV], sS)
        sdo = arrived(rdo, ii, STAGES)
        if left < C:
            # rows past the document's end belong to the next document
            x = sdo.load(MT)
            sdo.store(gl.where(gl.expand_dims(rT < left, 1), x, 0.0))
            fence_async_shared()
            gl.thread_barrier()
        scores = arrived(raq, ii, STAGES).permute((1, 0))
        U = warpgroup_mma(scores, sdo, zero, use_acc=False, is_async=True)
        U = warpgroup_mma(arrived(rkt, ii, STAGES), sS, U, is_async=True)
        update = arrived(rqh, ii, STAGES).permute((1, 0))
        S = warpgroup_mma(update, sdo, S * gl.expand_dims(d_now, 1), is_async=True)
        U = warpgroup_mma_wait(1, deps=[U])
        sU.store(U.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        inverse = arrived(rtb, ii, STAGES).permute((1, 0))
        X = warpgroup_mma(inverse, sU, U, is_async=True)
        X, S = warpgroup_mma_wait(0, deps=[X, S])
        removed = arrived(rkh, ii, STAGES).permute((1, 0))
        sX.store((0.0 - X).to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        S = warpgroup_mma(removed, sX, S, is_async=True)
        go = ii + STAGES < NT
        expect(do, rdo, ii % STAGES, go)
        expect_all(operands, rings, ii % STAGES, go)
        if not MAP:
            x = (0.0 - sX.load(LO).to(gl.float32)).to(gl.bfloat16)
            gl.store(dv + pO + i.to(gl.int64) * (C * H * V), x, mask=gl.expand_dims(rO < left, 1))
        S = warpgroup_mma_wait(0, deps=[S])
        if not MAP:
            tma.store_wait(0)
        gl.thread_barrier()
        fetch(do, bos + (i - STAGES) * C, column, rdo, ii % STAGES, go)
        fetch_all(operands, rings, b - STAGES * H, ii % STAGES, go)
        sS.store(S.to(gl.bfloat16))
    if STORE_DH0:
        state_out(dh0, i_out, pS, dS, S, H, D, V, 0)
    dismiss(rings, STAGES)
    dismiss((rdo,), STAGES)
