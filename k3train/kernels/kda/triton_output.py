"""The chain that writes the output: a program carries a head's state through a segment.

Rows, operands and layouts are those of ``triton_chain``; the last state is stored too where it is asked for.

Imports triton: import it inside functions only.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from k3train.kernels.kda.triton_ring import (
    arrived,
    dismiss,
    expect,
    expect_all,
    fetch,
    fetch_all,
    ring,
    segment,
    state_in,
    state_out,
    state_places,
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
    bos, T, c0, i_in, i_out = segment(rows)
    NT = (T + C - 1) // C
    rv = ring(v, STAGES)
    rkh = ring(kh, STAGES)
    rqh = ring(qh, STAGES)
    rtb = ring(tb, STAGES)
    raq = ring(aqk, STAGES)
    rkt = ring(kt, STAGES)
    operands = (kh, qh, tb, aqk, kt)
    rings = (rkh, rqh, rtb, raq, rkt)
    sS = gl.allocate_shared_memory(gl.bfloat16, [D, BV], v.layout)
    sR = gl.allocate_shared_memory(gl.bfloat16, [C, BV], v.layout)
    sU = gl.allocate_shared_memory(gl.bfloat16, [C, BV], v.layout)
    column = i_h * V + i_v * BV
    for s in gl.static_range(STAGES):
        expect(v, rv, s, s < NT)
        expect_all(operands, rings, s, s < NT)
    for s in gl.static_range(STAGES):
        fetch(v, bos + s * C, column, rv, s, s < NT)
        fetch_all(operands, rings, (c0 + s) * H + i_h, s, s < NT)
    pS, dS = state_places(i_h, i_v, D, V, BV, MS)
    S = gl.zeros([D, BV], gl.float32, MS)
    if HAS_H0:
        S = state_in(h0, i_in, pS, dS, H, D, V)
    sS.store(S.to(gl.bfloat16))
    zero = gl.zeros([C, BV], gl.float32, MT)
    rT = gl.arange(0, C, gl.SliceLayout(1, MT))
    rO = gl.arange(0, C, gl.SliceLayout(1, LO))
    vO = gl.arange(0, BV, gl.SliceLayout(0, LO))
    pO = (bos.to(gl.int64) * H + i_h) * V + i_v * BV + gl.expand_dims(rO * (H * V), 1) + gl.expand_dims(vO, 0)
    d_next = gl.load(dec + (c0 * H + i_h).to(gl.int64) * D + dS, mask=dS < NT * D, other=0.0)
    for i in range(NT):
        left = T - i * C
        b = (c0 + i) * H + i_h
        d_now = d_next
        d_next = gl.load(dec + (b + H).to(gl.int64) * D + dS, mask=dS < (NT - 1 - i) * D, other=0.0)
        fence_async_shared()
        gl.thread_barrier()
        R = warpgroup_mma(arrived(rkh, i, STAGES), sS, zero, use_acc=False, is_async=True)
        O = warpgroup_mma(arrived(rqh, i, STAGES), sS, zero, use_acc=False, is_async=True)
        x = arrived(rv, i, STAGES).load(MT).to(gl.float32)
        R = warpgroup_mma_wait(1, deps=[R])
        sR.store(gl.where(gl.expand_dims(rT < left, 1), x - R, 0.0).to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        U = warpgroup_mma(arrived(rtb, i, STAGES), sR, zero, use_acc=False, is_async=True)
        U, O = warpgroup_mma_wait(0, deps=[U, O])
        sU.store(U.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        O = warpgroup_mma(arrived(raq, i, STAGES), sU, O, is_async=True)
        update = arrived(rkt, i, STAGES).permute((1, 0))
        S = warpgroup_mma(update, sU, S * gl.expand_dims(d_now, 1), is_async=True)
        O = warpgroup_mma_wait(1, deps=[O])
        sR.store(O.to(gl.bfloat16))
        gl.thread_barrier()
        gl.store(o + pO + i.to(gl.int64) * (C * H * V), sR.load(LO), mask=gl.expand_dims(rO < left, 1))
        go = i + STAGES < NT
        expect(v, rv, i % STAGES, go)
        expect_all(operands, rings, i % STAGES, go)
        S = warpgroup_mma_wait(0, deps=[S])
        gl.thread_barrier()
        fetch(v, bos + (i + STAGES) * C, column, rv, i % STAGES, go)
        fetch_all(operands, rings, b + STAGES * H, i % STAGES, go)
        sS.store(S.to(gl.bfloat16))
    if STORE_HT:
        state_out(ht, i_out, pS, dS, S, H, D, V)
    dismiss(rings, STAGES)
    dismiss((rv,), STAGES)
