"""The inverse that turns a chunk's values into its corrections, see ``kda_inverse``.

Imports triton: import it inside functions only.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from k3train.kernels.kda.triton_math import bf16, fp16, product
from k3train.kernels.kda.triton_ring import arrived, dismiss, expect, fetch, ring


@gluon.jit
def own_blocks(x, BLOCKS: gl.constexpr):
    """x [64, 64], zero outside of its diagonal blocks of 16 -> the blocks [4, 16, 16], one a warp."""
    x = gl.sum(gl.reshape(x, [64, 4, 16]), 1)
    return gl.convert_layout(gl.reshape(x, [4, 16, 16]), BLOCKS, assert_trivial=True).to(gl.float32)


@gluon.jit
def on_blocks(x, near, MMA: gl.constexpr):
    """The inverse of ``own_blocks``."""
    x = gl.reshape(x, [64, 1, 16]).broadcast_to([64, 4, 16])
    x = gl.convert_layout(gl.reshape(x, [64, 64]), MMA, assert_trivial=True)
    return gl.where(near, x, gl.zeros_like(x))


@gluon.jit
def within(a, bt, acc, BLOCKS: gl.constexpr):
    """acc + a b of every warp's own [16, 16], b given transposed: its accumulators are the right operand."""
    a = gl.convert_layout(a, gl.DotOperandLayout(0, BLOCKS, 2), assert_trivial=True)
    b = gl.convert_layout(gl.permute(bt, (0, 2, 1)), gl.DotOperandLayout(1, BLOCKS, 2), assert_trivial=True)
    return mma_v2(a, b, acc)


@gluon.jit
def kda_inverse(akk, tb):
    """(I + A)^-1 - I of strictly lower A [64, 64]; ``tb`` may overwrite ``akk``.

    Diagonal blocks of 16 by products of (I + N^(2^i)), N = -A, each in one warp's registers. With their
    inverse D and M = -D A outside of the blocks the whole is (I + M^2) (I + M) D. fp16 operands: A is at most
    1, and doubling over blocks of 32 would lose the digits that blocks of 16 keep.
    """
    C: gl.constexpr = 64
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    DOT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    BLOCKS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    row = gl.program_id(0) * C
    ra = ring(akk, 1)
    sd = gl.allocate_shared_memory(gl.float16, [C, C], akk.layout)
    sm = gl.allocate_shared_memory(gl.float16, [C, C], akk.layout)
    expect(akk, ra, 0, True)
    fetch(akk, row, 0, ra, 0, True)
    i = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(1, MMA)), 1)
    j = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(0, MMA)), 0)
    near = (i // 16) == (j // 16)
    sa = arrived(ra, 0, 1)
    none = gl.zeros([C, C], gl.float16, MMA)
    P = 0.0 - own_blocks(gl.where(near, sa.load(MMA), none), BLOCKS)
    Q = 0.0 - own_blocks(gl.where(near, sa.permute((1, 0)).load(MMA), none), BLOCKS)
    r = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, BLOCKS)))
    c = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, BLOCKS)))
    eye = gl.expand_dims(gl.expand_dims(r, 0), 2) == gl.expand_dims(gl.expand_dims(c, 0), 1)
    X = gl.where(eye, 1.0, P)
    zero = gl.zeros([4, 16, 16], gl.float32, BLOCKS)
    for _ in gl.static_range(3):
        p = fp16(P)
        q = fp16(Q)
        P = within(p, q, zero, BLOCKS)
        Q = within(q, p, zero, BLOCKS)
        X = within(fp16(X), fp16(Q), X, BLOCKS)
    d = on_blocks(fp16(X), near, MMA)
    sd.store(d)
    zero = gl.zeros([C, C], gl.float32, MMA)
    m = product(gl.convert_layout(d, DOT), sa, zero, False)
    m = fp16(gl.where(near, 0.0, 0.0 - m))
    sm.store(m)
    fence_async_shared()
    gl.thread_barrier()
    ma = gl.convert_layout(m, DOT)
    X = warpgroup_mma(ma, sd, on_blocks(X, near, MMA), is_async=True)
    M2 = warpgroup_mma(ma, sm, zero, use_acc=False, is_async=True)
    X, M2, ma = warpgroup_mma_wait(0, deps=[X, M2, ma])
    sa.store(fp16(X))
    fence_async_shared()
    gl.thread_barrier()
    X = product(gl.convert_layout(fp16(M2), DOT), sa, X, True)
    out = sd._reinterpret(gl.bfloat16, [C, C], tb.layout)
    out.store(bf16(gl.where(i > j, X, 0.0)))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(tb, [row, 0], out)
    tma.store_wait(0)
    dismiss((ra,), 1)
