"""Experts' matrix products on Hopper, as Gluon kernels. Imports Triton: import it inside functions only.

A persistent program takes tile after tile. One warp brings operands into a ring of shared memory by bulk
copies and runs ahead, past the end of a tile too; four warps multiply. Two programs share a processor: one
multiplies while the other stores. An expert's last rows, where half a tile holds them, are half a tile.
Legend: t rows sorted by expert, k inputs, n outputs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS, COLUMNS = gl.constexpr(128), gl.constexpr(128)
"""Of a tile of the result."""
STEP, STAGES = gl.constexpr(64), gl.constexpr(3)
"""How much of the inner axis a slot of the ring holds, and slots."""
WARPS = gl.constexpr(4)
"""That multiply."""


@gluon.jit
def _make_ring(left, right):
    """Slots of both operands, and barriers that tell when one is full and when it is free again."""
    a = gl.allocate_shared_memory(left.dtype, [STAGES] + left.block_type.shape, left.layout)  # noqa: RUF005
    b = gl.allocate_shared_memory(right.dtype, [STAGES] + right.block_type.shape, right.layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(free.index(s), count=1)
    return a, b, full, free


@gluon.jit
def _end_ring(full, free):
    """Last of all: the compiler gives a barrier's memory away after the last use that it sees."""
    for s in gl.static_range(STAGES):
        mbarrier.invalidate(full.index(s))
        mbarrier.invalidate(free.index(s))


@gluon.jit
def _announce(left, right, full, free, i):
    """The slot and barrier for copy ``i``, once what the slot held has been multiplied."""
    slot = i % STAGES
    mbarrier.wait(free.index(slot), ((i // STAGES) & 1) ^ 1)
    bar = full.index(slot)
    mbarrier.expect(bar, left.block_type.nbytes + right.block_type.nbytes)
    return slot, bar


@gluon.jit
def _accumulate(x, y, acc, free, i, first):
    """acc += x @ y, without a wait for it; then the slot before is free."""
    acc = warpgroup_mma(x, y, acc, is_async=True)
    acc = warpgroup_mma_wait(1, deps=[acc])
    gl.thread_barrier()
    mbarrier.arrive(free.index((i + STAGES - 1) % STAGES), count=1, pred=i > first)
    return acc


@gluon.jit
def _finish(acc, free, i):
    acc = warpgroup_mma_wait(0, deps=[acc])
    gl.thread_barrier()
    mbarrier.arrive(free.index((i + STAGES - 1) % STAGES), count=1)
    return acc


@gluon.jit
def _tile_of(tiles, tile, COLUMN_TILES: gl.constexpr):
    """First row, end of the expert's rows, expert and column tile of a tile."""
    at = tiles + 3 * (tile // COLUMN_TILES)
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), tile % COLUMN_TILES


@gluon.jit
def _bring_products(
    rows,
    first,
    second,
    tiles,
    total,
    a,
    b,
    full,
    free,
    K: gl.constexpr,
    N: gl.constexpr,
    PARTS: gl.constexpr,
    BACK: gl.constexpr,
):
    STEPS: gl.constexpr = (K + STEP - 1) // STEP
    TILES: gl.constexpr = (N + COLUMNS - 1) // COLUMNS
    SUMS: gl.constexpr = PARTS if BACK else 1
    WIDE: gl.constexpr = 1 if BACK else PARTS
    i = 0
    for tile in range(gl.program_id(0), gl.load(total) * (TILES * WIDE), gl.num_programs(0)):
        row, _, expert, column = _tile_of(tiles, tile, TILES * WIDE)
        for step in range(STEPS * SUMS):
            slot, bar = _announce(rows, first, full, free, i)
            if BACK:
                part = step // STEPS
                inner = step % STEPS * STEP
                place = [expert * N + column * COLUMNS, inner]
                tma.async_copy_global_to_shared(rows, [row, part * K + inner], bar, a.index(slot))
            else:
                part = column // TILES
                place = [expert * K + step * STEP, column % TILES * COLUMNS]
                tma.async_copy_global_to_shared(rows, [row, step * STEP], bar, a.index(slot))
            if PARTS == 1:
                tma.async_copy_global_to_shared(first, place, bar, b.index(slot))
            else:
                tma.async_copy_global_to_shared(first, place, bar, b.index(slot), pred=part == 0)
                tma.async_copy_global_to_shared(second, place, bar, b.index(slot), pred=part == 1)
            i += 1


@gluon.jit
def _store(x, out, row, end, column, limit, stride, R: gl.constexpr, C: gl.constexpr):
    """x [R, C] to rows before ``end`` and columns before ``limit``."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // C, C // 8], [WARPS, 1], [1, 0])
    x = gl.convert_layout(x.to(out.dtype.element_ty), WIDE)
    r = row + gl.arange(0, R, gl.SliceLayout(1, WIDE))
    c = column + gl.arange(0, C, gl.SliceLayout(0, WIDE))
    at = gl.expand_dims(r.to(gl.int64) * stride, 1) + gl.expand_dims(c, 0)
    gl.store(out + at, x, mask=gl.expand_dims(r < end, 1) & gl.expand_dims(c < limit, 0))


@gluon.jit
def _product(
    a, b, full, free, i, out, row, end, column, limit, stride,
    STEPS: gl.constexpr, R: gl.constexpr, BACK: gl.constexpr,
):  # fmt: skip
    """One tile of R rows."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, COLUMNS, 16])
    acc = gl.zeros([R, COLUMNS], gl.float32, MMA)
    for step in range(i, i + STEPS):
        slot = step % STAGES
        mbarrier.wait(full.index(slot), (step // STAGES) & 1)
        y = b.index(slot)
        if BACK:
            y = y.permute((1, 0))
        acc = _accumulate(a.index(slot).slice(0, R), y, acc, free, step, i)
    acc = _finish(acc, free, i + STEPS)
    # in halves: less shared memory to turn them
    left, right = acc.reshape([R, 2, COLUMNS // 2]).permute((0, 2, 1)).split()
    _store(left, out, row, end, column, limit, stride, R, COLUMNS // 2)
    _store(right, out, row, end, column + COLUMNS // 2, limit, stride, R, COLUMNS // 2)


@gluon.jit
def _multiply_products(
    out,
    stride,
    tiles,
    total,
    a,
    b,
    full,
    free,
    K: gl.constexpr,
    N: gl.constexpr,
    PARTS: gl.constexpr,
    BACK: gl.constexpr,
):
    TILES: gl.constexpr = (N + COLUMNS - 1) // COLUMNS
    STEPS: gl.constexpr = (K + STEP - 1) // STEP * (PARTS if BACK else 1)
    WIDE: gl.constexpr = 1 if BACK else PARTS
    i = 0
    for tile in range(gl.program_id(0), gl.load(total) * (TILES * WIDE), gl.num_programs(0)):
        row, end, _, column = _tile_of(tiles, tile, TILES * WIDE)
        limit = (column // TILES + 1) * N
        column = column // TILES * N + column % TILES * COLUMNS
        if end - row > ROWS // 2:
            _product(a, b, full, free, i, out, row, end, column, limit, stride, STEPS, ROWS, BACK)
        else:
            _product(a, b, full, free, i, out, row, end, column, limit, stride, STEPS, ROWS // 2, BACK)
        i += STEPS


@gluon.jit
def products(
    rows,
    first,
    second,
    out,
    stride,
    tiles,
    total,
    K: gl.constexpr,
    N: gl.constexpr,
    PARTS: gl.constexpr,
    BACK: gl.constexpr,
):
    """Rows times their expert's matrices, of PARTS weights of inner size K and N columns.

    Forward: ``rows`` [t, K], weights [experts * K, N] in blocks STEP x COLUMNS, results side by side in
    ``out`` [t, PARTS * N]. BACK: ``rows`` [t, PARTS * K] side by side, weights [experts * N, K] in blocks
    COLUMNS x STEP, ``out`` [t, N] is their sum. ``tiles`` and ``total`` as ``list_groups`` leaves them.
    """
    a, b, full, free = _make_ring(rows, first)
    gl.warp_specialize(
        [
            (
                _multiply_products,
                (out, stride, tiles, total, a, b, full, free, K, N, PARTS, BACK),
            ),
            (
                _bring_products,
                (rows, first, second, tiles, total, a, b, full, free, K, N, PARTS, BACK),
            ),
        ],
        [1],
        [40],
    )
    _end_ring(full, free)
