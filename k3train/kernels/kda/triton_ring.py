"""What the chains share: their segments, and operands that come through rings of shared memory.

An operand has ``STAGES`` slots, filled by bulk copies while earlier chunks are computed, and a barrier a slot
of its own: Gluon synchronises all warps between two uses of one barrier, so with a common one every copy
would cost that.

The compiler knows neither that a barrier may be touched after the wait for it, nor that a product which has
been started still reads its operands. Both keep their memory only as long as something uses them: barriers
end at the end of a kernel (``dismiss``), and what is written while products run is allocated before them.

Imports triton: import it inside functions only.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def segment(rows):
    """First token, tokens, first chunk, slot of the state that enters and of the one that leaves."""
    row = rows + 6 * gl.program_id(2)
    return gl.load(row), gl.load(row + 1), gl.load(row + 2), gl.load(row + 3), gl.load(row + 4)


@gluon.jit
def state_places(
    i_h, i_v, D: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, MS: gl.constexpr, KEYS: gl.constexpr
):
    """Offsets in one slot of a state whose axis ``KEYS`` are key channels here, and the key channels [D]."""
    rows = gl.arange(0, D if KEYS == 0 else BV, gl.SliceLayout(1, MS))
    columns = gl.arange(0, BV if KEYS == 0 else D, gl.SliceLayout(0, MS))
    start = i_h.to(gl.int64) * (D * V) + i_v * BV
    if KEYS == 0:
        d = rows
        places = start + gl.expand_dims(rows * V, 1) + gl.expand_dims(columns, 0)
    else:
        d = columns
        places = start + gl.expand_dims(rows, 1) + gl.expand_dims(columns * V, 0)
    return places, d


@gluon.jit
def state_in(states, slot, places, d, H: gl.constexpr, D: gl.constexpr, V: gl.constexpr, KEYS: gl.constexpr):
    """The state in ``slot``, zero if that is negative."""
    known = gl.expand_dims(d < D * (slot + 1), 1 - KEYS)
    return gl.load(states + slot.to(gl.int64) * (H * D * V) + places, mask=known, other=0.0)


@gluon.jit
def state_out(
    states, slot, places, d, S, H: gl.constexpr, D: gl.constexpr, V: gl.constexpr, KEYS: gl.constexpr
):
    """Store a state in ``slot``, nowhere if that is negative."""
    known = gl.expand_dims(d < D * (slot + 1), 1 - KEYS)
    gl.store(states + slot.to(gl.int64) * (H * D * V) + places, S, mask=known)


@gluon.jit
def factors(s, MS: gl.constexpr):
    """A chunk's decay of the state [1, D]."""
    return gl.expand_dims(s.load(gl.SliceLayout(0, MS)), 0)


@gluon.jit
def ring(operand, STAGES: gl.constexpr):
    """Slots of an operand, given by its tensor map, and their barriers."""
    slots = gl.allocate_shared_memory(operand.dtype, [STAGES] + operand.block_type.shape, operand.layout)  # noqa: RUF005
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(bars.index(s), count=1)
    return slots, bars


@gluon.jit
def expect(operand, r, slot, go):
    """Announce a copy. All warps must meet between this and ``fetch``, and between a wait and this."""
    mbarrier.expect(r[1].index(slot), operand.block_type.nbytes, pred=go)


@gluon.jit
def fetch(operand, row, column, r, slot, go):
    """Start the copy of the block at ``row`` and ``column``."""
    tma.async_copy_global_to_shared(operand, [row, column], r[1].index(slot), r[0].index(slot), pred=go)


@gluon.jit
def arrived(r, i, STAGES: gl.constexpr, comes=True):
    """The slot for the ``i``-th block of an operand, once the block is there if it ``comes`` at all."""
    mbarrier.wait(r[1].index(i % STAGES), (i // STAGES) & 1, pred=comes)
    return r[0].index(i % STAGES)


@gluon.jit
def expect_all(operands, rings, slot, go):
    """Announce the copies of a chunk's operands."""
    for n in gl.static_range(len(operands)):
        expect(operands[n], rings[n], slot, go)


@gluon.jit
def fetch_all(operands, rings, tile, slot, go):
    """Start them; every one has 64 rows a chunk and head."""
    for n in gl.static_range(len(operands)):
        fetch(operands[n], tile * 64, 0, rings[n], slot, go)


@gluon.jit
def turned(x):
    """The transposed matrix."""
    return x.permute((1, 0))


@gluon.jit
def dismiss(rings, STAGES: gl.constexpr):
    """End the barriers, last of all: the compiler gives their memory away after the last use that it sees."""
    for s in gl.static_range(STAGES):
        for n in gl.static_range(len(rings)):
            mbarrier.invalidate(rings[n][1].index(s))
