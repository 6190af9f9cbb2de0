"""The chain that writes the output: a program carries a head's state through a segment.

Rows, operands and layouts are those of ``triton_chain``; the last state is stored too where it is asked for.

Imports triton: import it inside functions only.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
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
):
    C: gl.constexpr = 64
    W: gl.constexpr = BV // 16
    MS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, D, 16])
    MT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, C, 16])
    DOT: gl.constexpr = gl.DotOperandLayout(0, MT, 2)
    LD: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
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
    sd = gl.allocate_shared_memory(gl.float32, [D], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    sO = gl.allocate_shared_memory(gl.bfloat16, [C, BV], v.layout)
    column = i_h * V + i_v * BV
    for s in gl.static_range(STAGES):
        expect(v, rv, s, s < NT)
        expect_all(operands, rings, s, s < NT)
    for s in gl.static_range(STAGES):
        fetch(v, bos + s * C, column, rv, s, s < NT)
        fetch_all(operands, rings, (c0 + s) * H + i_h, s, s < NT)
    pS, dS = state_places(i_h, i_v, D, V, BV, MS, 1)
    S = gl.zeros([BV, D], gl.float32, MS)
    if HAS_H0:
        S = state_in(h0, i_in, pS, dS, H, D, V, 1)
    zero = gl.zeros([BV, C], gl.float32, MT)
    rT = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(0, MT)), 0)
    rO = gl.arange(0, C, gl.SliceLayout(1, LO))
    vO = gl.arange(0, BV, gl.SliceLayout(0, LO))
    pO = (bos.to(gl.int64) * H + i_h) * V + i_v * BV + gl.expand_dims(rO * (H * V), 1) + gl.expand_dims(vO, 0)
    d = gl.arange(0, D, LD)
    sd.store(gl.load(dec + (c0 * H + i_h).to(gl.int64) * D + d, mask=d < NT * D, other=0.0))
    gl.thread_barrier()
    for i in range(NT):
        left = T - i * C
        b = (c0 + i) * H + i_h
        d_next = gl.load(dec + (b + H).to(gl.int64) * D + d, mask=d < (NT - 1 - i) * D, other=0.0)
        a = gl.convert_layout(bf16(S), DOT, assert_trivial=True)
        R = warpgroup_mma(a, turned(arrived(rkh, i, STAGES)), zero, use_acc=False, is_async=True)
        O = warpgroup_mma(a, turned(arrived(rqh, i, STAGES)), zero, use_acc=False, is_async=True)
        x = gl.where(rT < left, wide(turned(arrived(rv, i, STAGES)).load(MT)), 0.0)
        S = S * factors(sd, MS)
        inverse = turned(arrived(rtb, i, STAGES))
        R = warpgroup_mma_wait(1, deps=[R])
        x -= R
        r = gl.convert_layout(bf16(x), DOT, assert_trivial=True)
        U = warpgroup_mma(r, inverse, x, is_async=True)
        scores = turned(arrived(raq, i, STAGES))
        update = arrived(rkt, i, STAGES)
        U, O, a, r = warpgroup_mma_wait(0, deps=[U, O, a, r])
        a = gl.convert_layout(bf16(U), DOT, assert_trivial=True)
        O = warpgroup_mma(a, scores, O, is_async=True)
        S = warpgroup_mma(a, update, S, is_async=True)
        go = i + STAGES < NT
        expect(v, rv, i % STAGES, go)
        expect_all(operands[:3], rings[:3], i % STAGES, go)
        O = warpgroup_mma_wait(1, deps=[O])
        turned(sO).store(bf16(O))
        gl.thread_barrier()
        sd.store(d_next)
        fetch(v, bos + (i + STAGES) * C, column, rv, i % STAGES, go)
        fetch_all(operands[:3], rings[:3], b + STAGES * H, i % STAGES, go)
        gl.store(o + pO + i.to(gl.int64) * (C * H * V), sO.load(LO), mask=gl.expand_dims(rO < left, 1))
        S, a = warpgroup_mma_wait(0, deps=[S, a])
        expect_all(operands[3:], rings[3:], i % STAGES, go)
        gl.thread_barrier()
        fetch_all(operands[3:], rings[3:], b + STAGES * H, i % STAGES, go)
    if STORE_HT:
        state_out(ht, i_out, pS, dS, S, H, D, V, 1)
    dismiss(rings, STAGES)
    dismiss((rv,), STAGES)
