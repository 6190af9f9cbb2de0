"""Device functions shared by the Hopper kernels. Imports triton: import it inside functions only."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def ex2(x):
    """2^x, flushing subnormals; a plain ``exp2`` spends three more instructions on them."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def sigmoid(x):
    y = 1.0 + ex2(x * -1.4426950408889634)
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [y], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def wide(x):
    """bf16 -> fp32, one instruction an element where the compiler takes two."""
    return gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [x], dtype=gl.float32, is_pure=True,
        pack=2,
    )  # fmt: skip


@gluon.jit
def bf16(x):
    """Round pairs of values in one instruction; single conversions run at a quarter of its rate."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def fp16(x):
    """As ``bf16``, to fp16."""
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.float16, is_pure=True, pack=2
    )


@gluon.jit
def to_channels(x, MMA: gl.constexpr):
    """[tokens, channels] as loaded -> [channels, tokens] as the tensor cores accumulate."""
    return gl.convert_layout(gl.permute(x, (1, 0)), MMA)


@gluon.jit
def put(p, x, mask, LD: gl.constexpr):
    """Store [channels, tokens] as bf16 rows of tokens."""
    gl.store(p, gl.convert_layout(gl.permute(bf16(x), (1, 0)), LD), mask=mask)


@gluon.jit
def product(a, b, acc, use_acc: gl.constexpr):
    """acc + a b, the left operand in registers. Waiting on ``a`` keeps its registers from early reuse."""
    acc = warpgroup_mma(a, b, acc, use_acc=use_acc, is_async=True)
    acc, a = warpgroup_mma_wait(0, deps=[acc, a])
    return acc


@gluon.jit
def log2_gates(x, mask, rate, bias, bound, DOT: gl.constexpr):
    """fp32 z [channels, tokens] -> bounded log2 gates as an fp16 left operand, and their sum [channels].

    One fp16 part is enough: its 2^-12 relative error is a sixteenth of the rounding of the bf16 input, and
    every sum over positions sees the same rounded gate.
    """
    s = sigmoid((x + gl.expand_dims(bias, 1)) * rate)
    g = gl.where(gl.expand_dims(mask, 0), s * (bound * 1.4426950408889634), 0.0)
    g = fp16(g)
    return gl.convert_layout(g, DOT), gl.sum(g.to(gl.float32), 1)


@gluon.jit
def store_triangle(tri, LT: gl.constexpr):
    """fp16 0/1 matrix [32, 32] that sums gates up to and with a position (rows are summed over)."""
    i = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(1, LT)), 1)
    j = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, LT)), 0)
    tri.store((i <= j).to(gl.float16))


@gluon.jit
def of_tokens(s, which: gl.constexpr, block: gl.constexpr, TK: gl.constexpr):
    """A block's values [32] of vector ``which`` of several [64] in shared memory."""
    return s.slice(64 * which + 32 * block, 32).load(TK)


@gluon.jit
def clear_rows(s, left, LN: gl.constexpr):
    """Zero the rows of [64, .] past the document's end: they belong to the next document."""
    x = s.load(LN)
    inside = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, LN)) < left, 1)
    s.store(gl.where(inside, x, gl.zeros_like(x)))
